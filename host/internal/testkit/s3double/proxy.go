package s3double

import (
	"errors"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"
)

// Fault is what a proxy does to a request.
type Fault string

// The faults.
const (
	Busy      Fault = "503 SlowDown"
	TooMany   Fault = "429"
	Broken    Fault = "500 InternalError"
	Expired   Fault = "403 ExpiredToken"
	Denied    Fault = "403 AccessDenied"
	ActDenied Fault = "the server acts, and 403 AccessDenied"
	Reset     Fault = "the connection ends"
	ResetLate Fault = "the server acts, and the connection ends" // before its answer
	Stall     Fault = "no answer"
	Late      Fault = "the answer is half a second late"
	Half      Fault = "half of the body"
	Wrong     Fault = "a byte of the body is another"
	SameToken Fault = "a list goes on with the same token"
	Foreign   Fault = "a list has a short key of somewhere else"
	Negative  Fault = "a list has negative sizes"
)

// lists are the lies in lists.
var lists = map[Fault]struct {
	pattern *regexp.Regexp
	to      string
}{
	SameToken: {regexp.MustCompile(`<IsTruncated>false</IsTruncated>`), `<IsTruncated>true</IsTruncated><NextContinuationToken>again</NextContinuationToken>`},
	Foreign:   {regexp.MustCompile(`<Key>[^<]*</Key>`), `<Key>x</Key>`},
	Negative:  {regexp.MustCompile(`<Size>[^<]*</Size>`), `<Size>-9000000000000000000</Size>`},
}

// Rule is when a fault is injected.
type Rule struct {
	Fault  Fault
	Method string // empty: any
	In     string // of the path and query; empty: any
	After  int    // requests that fit go by first
	Times  int    // 0: for ever
	Every  int    // of the requests that fit, each so manieth; 0: all
}

// Proxy is in front of a server.
type Proxy struct {
	URL string

	mu    sync.Mutex
	rules []Rule
	seen  []int
	did   int
	ended chan struct{}
}

// StartProxy runs a proxy of a server until the test ends.
func StartProxy(t testing.TB, server string) *Proxy {
	target, err := url.Parse(server)
	if err != nil {
		t.Fatal(err)
	}
	p := &Proxy{ended: make(chan struct{})}
	forward := &httputil.ReverseProxy{Rewrite: func(r *httputil.ProxyRequest) { // what is signed names the proxy as the host
		r.SetURL(target)
		r.Out.Host = r.In.Host
	}, ErrorLog: log.New(io.Discard, "", 0)} // clients give requests up
	h := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { p.serve(forward, w, r) }))
	p.URL = h.URL
	t.Cleanup(func() { close(p.ended); h.CloseClientConnections(); h.Close() })
	return p
}

func (p *Proxy) Set(rules ...Rule) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.rules, p.seen, p.did = slices.Clone(rules), make([]int, len(rules)), 0
}

// Injected is how many faults there were since Set.
func (p *Proxy) Injected() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.did
}

func (p *Proxy) fault(r *http.Request) Fault {
	p.mu.Lock()
	defer p.mu.Unlock()
	for i, rule := range p.rules {
		if rule.Method != "" && rule.Method != r.Method || !strings.Contains(r.URL.RequestURI(), rule.In) {
			continue
		}
		p.seen[i]++
		if n := p.seen[i] - rule.After; n > 0 && (rule.Times == 0 || n <= rule.Times) && n%max(1, rule.Every) == 0 {
			p.did++
			return rule.Fault
		}
	}
	return ""
}

func (p *Proxy) serve(forward http.Handler, w http.ResponseWriter, r *http.Request) {
	fault := p.fault(r)
	switch fault {
	case "":
		forward.ServeHTTP(w, r)
	case Late:
		select {
		case <-r.Context().Done():
		case <-p.ended:
		case <-time.After(500 * time.Millisecond):
			forward.ServeHTTP(w, r)
		}
	case Busy:
		_, _ = io.Copy(io.Discard, r.Body)
		fail(w, http.StatusServiceUnavailable, "SlowDown")
	case TooMany:
		_, _ = io.Copy(io.Discard, r.Body)
		w.WriteHeader(http.StatusTooManyRequests)
	case Broken:
		_, _ = io.Copy(io.Discard, r.Body)
		fail(w, http.StatusInternalServerError, "InternalError")
	case Expired:
		fail(w, http.StatusForbidden, "ExpiredToken")
	case ActDenied:
		forward.ServeHTTP(httptest.NewRecorder(), r)
		fail(w, http.StatusForbidden, "AccessDenied")
	case Denied:
		fail(w, http.StatusForbidden, "AccessDenied")
	case Stall:
		select {
		case <-r.Context().Done():
		case <-p.ended:
		}
		panic(http.ErrAbortHandler)
	case Reset:
		panic(http.ErrAbortHandler)
	case ResetLate:
		forward.ServeHTTP(httptest.NewRecorder(), r)
		panic(http.ErrAbortHandler)
	case Half, Wrong, SameToken, Foreign, Negative:
		answer := httptest.NewRecorder()
		forward.ServeHTTP(answer, r)
		for name, values := range answer.Header() {
			w.Header()[name] = values
		}
		body := answer.Body.Bytes()
		if change, lies := lists[fault]; lies {
			body = change.pattern.ReplaceAll(body, []byte(change.to))
			w.Header().Set("Content-Length", strconv.Itoa(len(body)))
		}
		w.WriteHeader(answer.Code)
		if fault == Half {
			_, _ = w.Write(body[:len(body)/2])
			_ = http.NewResponseController(w).Flush()
			panic(http.ErrAbortHandler)
		}
		if fault == Wrong && len(body) > 0 {
			body[len(body)/2] ^= 1
		}
		_, _ = w.Write(body)
	default:
		panic(errors.New("unknown fault " + string(fault)))
	}
}
