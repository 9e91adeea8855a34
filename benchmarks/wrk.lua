-- SPDX-License-Identifier: Apache-2.0
-- Makes the requests of benchmarks/load.py for wrk. Arguments after "--": the part of an event
-- before its message id, the part after it, the number of events per request, the name of the run,
-- and the Authorization header. Every event has a different message id.

local thread_count = 0

function setup(thread)
   thread_count = thread_count + 1
   thread:set("number", thread_count)
end

function init(arguments)
   head, tail, size = arguments[1], arguments[2], tonumber(arguments[3])
   run = arguments[4]
   count = 0
   wrk.method = "POST"
   wrk.headers["Content-Type"] = "application/json"
   wrk.headers["Authorization"] = arguments[5]
end

local function event()
   count = count + 1
   return head .. string.format("%s-%03d-%09d", run, number, count) .. tail
end

function request()
   if size == 1 then
      return wrk.format(nil, nil, nil, event())
   end
   local events = {}
   for index = 1, size do
      events[index] = event()
   end
   return wrk.format(nil, nil, nil, '{"batch":[' .. table.concat(events, ",") .. "]}")
end

function done(summary, latency, requests)
   io.write(string.format(
      'RESULT {"requests": %d, "microseconds": %d, "p50": %d, "p99": %d, "bad": %d}\n',
      summary.requests, summary.duration, latency:percentile(50), latency:percentile(99),
      summary.errors.status + summary.errors.connect + summary.errors.read
         + summary.errors.write + summary.errors.timeout))
end
