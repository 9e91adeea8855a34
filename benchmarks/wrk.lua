-- SPDX-License-Identifier: Apache-2.0
-- Requests of benchmarks/run.py for wrk. Arguments after "--": the head of each body, its tail, and
-- for batches how many events are in one. Every event has a message id of its own.

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
