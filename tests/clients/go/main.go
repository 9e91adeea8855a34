// SPDX-License-Identifier: Apache-2.0

// Sends one request per line of standard input with Go's net/http, all with one client, and prints
// one line of JSON for each answer.
package main

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptrace"
	"os"
	"time"
)

type request struct {
	Method  string            `json:"method"`
	URL     string            `json:"url"`
	Headers map[string]string `json:"headers"`
	Body    string            `json:"body"` // base64
	Chunked bool              `json:"chunked"`
	Close   bool              `json:"close"`
}

type answer struct {
	Status  int                 `json:"status"`
	Headers map[string][]string `json:"headers"`
	Body    string              `json:"body"` // base64
	Reused  bool                `json:"reused"`
	Got100  bool                `json:"got100"`
	Error   string              `json:"error,omitempty"`
}

// unsized hides a reader's length from net/http, which then sends chunks.
type unsized struct{ io.Reader }

func do(client *http.Client, r request) (a answer) {
	raw, err := base64.StdEncoding.DecodeString(r.Body)
	if err != nil {
		a.Error = err.Error()
		return
	}
	var body io.Reader
	if len(raw) > 0 {
		body = bytes.NewReader(raw)
		if r.Chunked {
			body = unsized{body}
		}
	}
	req, err := http.NewRequest(r.Method, r.URL, body)
	if err != nil {
		a.Error = err.Error()
		return
	}
	for name, value := range r.Headers {
		req.Header.Set(name, value)
	}
	req.Close = r.Close
	trace := &httptrace.ClientTrace{
		GotConn:        func(info httptrace.GotConnInfo) { a.Reused = info.Reused },
		Got100Continue: func() { a.Got100 = true },
	}
	res, err := client.Do(req.WithContext(httptrace.WithClientTrace(req.Context(), trace)))
	if err != nil {
		a.Error = err.Error()
		return
	}
	defer res.Body.Close()
	content, err := io.ReadAll(res.Body)
	if err != nil {
		a.Error = err.Error()
	}
	a.Status, a.Headers, a.Body = res.StatusCode, res.Header, base64.StdEncoding.EncodeToString(content)
	return
}

func main() {
	client := &http.Client{
		Timeout:   60 * time.Second,
		Transport: &http.Transport{ExpectContinueTimeout: 30 * time.Second},
	}
	in, out := json.NewDecoder(os.Stdin), json.NewEncoder(os.Stdout)
	for {
		var r request
		if in.Decode(&r) != nil {
			return
		}
		if out.Encode(do(client, r)) != nil {
			os.Exit(1)
		}
	}
}
