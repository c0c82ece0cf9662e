package spans

import (
	"bytes"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"go.opentelemetry.io/otel/attribute"
	coltracepb "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	tracepb "go.opentelemetry.io/proto/otlp/trace/v1"
	"google.golang.org/protobuf/proto"

	"github.com/kvhost/kvhost/abi/testenv"
)

const traceparent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"

// traces is a tracer that sends through a transport of the test's, or over the network.
func traces(t testing.TB, c Config, through http.RoundTripper) *Tracer {
	t.Helper()
	client := newClient(c)
	if through != nil {
		client.Transport = again{through, c.Headers}
	}
	tr, err := newTracer("1.2", c, client, slog.New(slog.DiscardHandler))
	testenv.OK(t, err)
	return tr
}

// A span is what OpenTelemetry's own code reads, whatever the environment says about exporters.
func TestSpan(t *testing.T) {
	for _, name := range []string{"ENDPOINT", "TRACES_ENDPOINT", "HEADERS", "CERTIFICATE", "COMPRESSION", "PROTOCOL", "TIMEOUT"} {
		t.Setenv("OTEL_EXPORTER_OTLP_"+name, "of-an-engine")
	}
	t.Setenv("OTEL_BSP_MAX_QUEUE_SIZE", "1")
	t.Setenv("OTEL_SPAN_ATTRIBUTE_VALUE_LENGTH_LIMIT", "1")
	t.Setenv("OTEL_TRACES_SAMPLER", "always_off")
	t.Setenv("OTEL_SERVICE_NAME", "mine")
	t.Setenv("OTEL_RESOURCE_ATTRIBUTES", "service.name=other,team=a%20b")
	c := newCollector(t, nil)
	tr := traces(t, Config{Endpoint: c.URL, Ratio: 1, Timeout: time.Minute}, nil)
	s := tr.Begin(traceparent)
	from := time.Now()
	part, link := s.Part(from.Add(5)), s.Child(from)
	part.End(&Ended{Name: "kvhost.read", To: from.Add(6)})
	s.End(&Ended{
		Name: "kvhost.load", To: from.Add(time.Second), Failure: "bad \xff bytes", Code: "DAMAGED",
		Attributes: []attribute.KeyValue{Number("n", -1), attribute.Int64Slice("list", []int64{1, 300, -7}), Text("long", strings.Repeat("x", 2*longestText)), Text("bad", "\xff")},
		Session:    []attribute.KeyValue{Text("kvhost.model", "m")}, Link: &link,
		Events: []Event{{Name: "never"}, {Name: "read", At: from.Add(time.Millisecond)}},
	})
	tr.Close()
	if len(c.sent()) != 1 {
		t.Fatalf("want one batch, got %d", len(c.sent()))
	}
	got := c.sent()[0].ResourceSpans[0]
	resource := map[string]string{}
	for _, a := range got.Resource.Attributes {
		resource[a.Key] = a.Value.GetStringValue()
	}
	if resource["service.name"] != "mine" || resource["team"] != "a b" || resource["service.version"] != "1.2" {
		t.Errorf("want the service mine 1.2 of team a b, got %v", resource)
	}
	scope := got.ScopeSpans[0]
	if scope.Scope.Version != "1.2" || len(scope.Spans) != 2 {
		t.Fatalf("want two spans of version 1.2, got %v", scope)
	}
	child, p := scope.Spans[0], scope.Spans[1]
	if child.StartTimeUnixNano != uint64(from.UnixNano())+5 || child.EndTimeUnixNano != uint64(from.UnixNano())+6 || p.Flags != 0x301 {
		t.Errorf("want a part of a nanosecond and a remote parent, got %v and flags %#x", child, p.Flags)
	}
	if p.Status.GetCode() != tracepb.Status_STATUS_CODE_ERROR || p.Status.GetMessage() != "bad \uFFFD bytes" {
		t.Errorf("want an error whose text is UTF-8, got %v", p.Status)
	}
	if len(p.Events) != 1 || p.Events[0].Name != "read" || len(p.Links) != 1 || !bytes.Equal(p.Links[0].TraceId, p.TraceId) {
		t.Errorf("want one event and one link, got %v and %v", p.Events, p.Links)
	}
	at := map[string]int{}
	for i, a := range p.Attributes {
		at[a.Key] = i
	}
	value := func(key string) string { return p.Attributes[at[key]].Value.String() }
	list := p.Attributes[at["list"]].Value.GetArrayValue().GetValues()
	if p.Attributes[at["n"]].Value.GetIntValue() != -1 || len(list) != 3 || list[2].GetIntValue() != -7 ||
		len(p.Attributes[at["long"]].Value.GetStringValue()) != longestText || !strings.Contains(value("error.type"), "DAMAGED") ||
		!strings.Contains(value("kvhost.model"), "m") || p.Attributes[at["bad"]].Value.GetStringValue() != "\uFFFD" || len(at) != 6 {
		t.Errorf("want six attributes, a long one cut and a bad one mended, got %v", p.Attributes)
	}
}

func decode(t *testing.T, body []byte) *tracepb.TracesData {
	t.Helper()
	var got tracepb.TracesData
	testenv.OK(t, proto.Unmarshal(body, &got))
	if len(got.ProtoReflect().GetUnknown()) > 0 {
		t.Fatal("unknown fields")
	}
	return &got
}

// idle sends nothing.
var idle = transport(func(q *http.Request) (*http.Response, error) {
	return &http.Response{StatusCode: http.StatusOK, Body: http.NoBody, Request: q}, nil
})

// The client's decision counts; without one the ratio does.
func TestSampling(t *testing.T) {
	count := func(ratio float64, parent string) (n int) {
		tr := traces(t, Config{Endpoint: "http://a", Ratio: ratio}, idle)
		defer tr.Close()
		for range 10000 {
			if s := tr.Begin(parent); s.On() {
				n++
			}
		}
		return n
	}
	unsampled := traceparent[:len(traceparent)-1] + "0"
	for _, c := range []struct {
		ratio    float64
		parent   string
		low, top int
	}{
		{0, "", 0, 0}, {1, "", 10000, 10000}, {0.1, "", 700, 1300},
		{0, traceparent, 10000, 10000}, {1, unsampled, 0, 0}, {0, "nonsense", 0, 0}, {1, "nonsense", 10000, 10000},
		{0, strings.ToUpper(traceparent), 0, 0}, {0, traceparent + "-more", 0, 0}, // version 0 has no more
		{0, "00-00000000000000000000000000000000-00f067aa0ba902b7-01", 0, 0},
	} {
		if n := count(c.ratio, c.parent); n < c.low || n > c.top {
			t.Errorf("ratio %v, parent %q: want %d to %d of 10000, got %d", c.ratio, c.parent, c.low, c.top, n)
		}
	}
	var none *Tracer
	if s := none.Begin(traceparent); s.On() {
		t.Error("want no span of no tracer, got one")
	}
}

func FuzzHeaders(f *testing.F) {
	f.Add([]byte("Authorization: Bearer x\n# no\n\nX-Tenant: a\n"))
	f.Fuzz(func(t *testing.T, file []byte) {
		headers, err := Headers(file)
		if err != nil {
			return
		}
		q, err := http.NewRequest(http.MethodPost, "http://127.0.0.1/", nil)
		testenv.OK(t, err)
		for name, value := range headers {
			q.Header.Set(name, value)
		}
		if err := q.Write(io.Discard); err != nil {
			t.Errorf("%q is taken, and cannot be sent: %v", file, err)
		}
	})
}

func TestHeaders(t *testing.T) {
	h, err := Headers([]byte("# secrets\nauthorization: Bearer abc:def \n\nX-Scope-OrgID: t\n"))
	if err != nil || h["Authorization"] != "Bearer abc:def" || h["X-Scope-Orgid"] != "t" {
		t.Errorf("headers of the file: got %v, %v", h, err)
	}
	for _, text := range []string{"secret", "a b: secret", ": secret", "X: secret\x01", "Host: secret", "content-type: secret", "X: a\nx: secret"} {
		if _, err := Headers([]byte(text)); err == nil || strings.Contains(err.Error(), "secret") {
			t.Errorf("headers %q: got error %v", text, err)
		}
	}
}

func TestEndpoint(t *testing.T) {
	for text, want := range map[string]string{
		"http://127.0.0.1:4318":           "http://127.0.0.1:4318/v1/traces",
		"https://collector/":              "https://collector/v1/traces",
		"https://collector/otlp/traces":   "https://collector/otlp/traces",
		"https://user:secret@collector":   "",
		"https://collector:secret/":       "",
		"grpc://collector":                "",
		"collector:4317":                  "",
		"http://":                         "",
		"http://collector/?token=secrets": "",
	} {
		got, err := Endpoint(text)
		if got != want || (err == nil) != (want != "") {
			t.Errorf("endpoint %q: got %q, %v", text, got, err)
		}
		if err != nil && strings.Contains(text, "user:") && strings.Contains(err.Error(), "secret") {
			t.Errorf("%v repeats the password", err)
		}
	}
}

// A request that gets no span costs nothing.
func TestWithoutSpanNothingIsAllocated(t *testing.T) {
	off := traces(t, Config{Ratio: 1}, idle)
	unsampled := traces(t, Config{Endpoint: "http://a", Ratio: 0}, idle)
	defer unsampled.Close()
	for name, tr := range map[string]*Tracer{"off": off, "not sampled": unsampled} {
		if n := testing.AllocsPerRun(1000, func() {
			s := tr.Begin("")
			s.End(&Ended{Name: "x"})
		}); n != 0 {
			t.Errorf("%s: want no allocation, got %v", name, n)
		}
	}
}

// collector answers exports, and tells of each.
type collector struct {
	*httptest.Server
	answer func(http.ResponseWriter)

	mu      sync.Mutex
	batches []*tracepb.TracesData
	spans   int
}

func newCollector(t *testing.T, answer func(http.ResponseWriter)) *collector {
	c := &collector{answer: answer}
	c.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		if err != nil {
			return
		}
		n, data := 0, decode(t, body)
		for _, rs := range data.ResourceSpans {
			for _, ss := range rs.ScopeSpans {
				n += len(ss.Spans)
			}
		}
		c.mu.Lock()
		c.batches, c.spans = append(c.batches, data), c.spans+n
		c.mu.Unlock()
		if c.answer != nil {
			w.Header().Set("Content-Type", "application/x-protobuf")
			c.answer(w)
		}
	}))
	t.Cleanup(c.Close)
	return c
}

func (c *collector) seen() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.spans
}

func (c *collector) sent() []*tracepb.TracesData {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.batches
}

func end(tr *Tracer, n int) {
	for range n {
		s := tr.Begin("")
		s.End(&Ended{Name: "x", To: time.Now()})
	}
}

// What the collector refuses is counted, and not tried again.
func TestRefusedSpansAreCounted(t *testing.T) {
	for _, c := range []struct {
		what   string
		answer func(http.ResponseWriter)
		want   Stats
	}{
		{"a status", func(w http.ResponseWriter) { w.WriteHeader(http.StatusUnauthorized) }, Stats{Failed: 10}},
		{"some of them", func(w http.ResponseWriter) { w.Write(response(t, 4)) }, Stats{Exported: 6, Failed: 4}},
		{"more than there are", func(w http.ResponseWriter) { w.Write(response(t, 1<<60)) }, Stats{Failed: 10}},
		{"a redirect", func(w http.ResponseWriter) { w.Header().Set("Location", "/x"); w.WriteHeader(http.StatusFound) }, Stats{Failed: 10}},
		{"nonsense", func(w http.ResponseWriter) { w.Write([]byte("\xff\xff")) }, Stats{Failed: 10}},
	} {
		t.Run(c.what, func(t *testing.T) {
			col := newCollector(t, c.answer)
			tr := traces(t, Config{Endpoint: col.URL, Ratio: 1, Timeout: time.Minute}, nil)
			end(tr, 10)
			tr.Close()
			if n := col.seen(); n != 10 || tr.Stats() != c.want {
				t.Errorf("%d spans came, %+v, want %+v", n, tr.Stats(), c.want)
			}
		})
	}
}

// What a collector answers is in the log, but no more of it than a line.
func TestLongAnswersAreCut(t *testing.T) {
	c := newCollector(t, func(w http.ResponseWriter) {
		w.WriteHeader(http.StatusForbidden)
		w.Write(bytes.Repeat([]byte("no "), 1<<20))
	})
	var log bytes.Buffer
	tr, err := New("", Config{Endpoint: c.URL, Ratio: 1, Timeout: time.Minute}, slog.New(slog.NewTextHandler(&log, nil)))
	testenv.OK(t, err)
	end(tr, 1)
	tr.Close()
	if s := tr.Stats(); s != (Stats{Failed: 1}) || log.Len() == 0 || log.Len() > 2*longestText {
		t.Errorf("want a failed span and a line of at most %d bytes, got %+v and %d bytes", 2*longestText, s, log.Len())
	}
}

// response is an ExportTraceServiceResponse.
func response(t *testing.T, rejected int64) []byte {
	t.Helper()
	b, err := proto.Marshal(&coltracepb.ExportTraceServiceResponse{PartialSuccess: &coltracepb.ExportTracePartialSuccess{RejectedSpans: rejected, ErrorMessage: "why (2 of them),\nand how"}})
	testenv.OK(t, err)
	return b
}

// transport answers without a network, so that time can be a bubble's.
type transport func(*http.Request) (*http.Response, error)

func (f transport) RoundTrip(q *http.Request) (*http.Response, error) { return f(q) }

// A collector that is busy is asked again after as long as it wants, and one that cannot be reached after a while.
func TestRetries(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var at []time.Duration
		began := time.Now()
		tr := traces(t, Config{Endpoint: "http://a", Ratio: 1, Timeout: time.Minute}, transport(func(q *http.Request) (*http.Response, error) {
			at = append(at, time.Since(began))
			r := &http.Response{StatusCode: http.StatusServiceUnavailable, Header: http.Header{}, Body: http.NoBody, Request: q}
			switch len(at) {
			case 1:
				r.Header.Set("Retry-After", "7")
			case 2:
				return nil, syscall.ECONNREFUSED
			case 3:
				r.StatusCode = http.StatusOK
			}
			return r, nil
		}))
		end(tr, 3)
		time.Sleep(time.Minute) // of the bubble
		synctest.Wait()
		if len(at) != 3 || at[0] != delay || at[1] != delay+7*time.Second || at[2] < at[1]+500*time.Millisecond || at[2] > at[1]+3*time.Second {
			t.Errorf("want attempts after a second, seven more, and about two more, got %v", at)
		}
		if s := tr.Stats(); s.Exported != 3 || s.Failed != 0 {
			t.Errorf("want 3 exported, got %+v", s)
		}
		tr.Close()
	})
}

// A collector that hangs costs neither requests their time nor the host its memory; what it does not take is counted; and the end of
// the tracer waits a second for it at most.
func TestHangingCollector(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		asked := make(chan struct{}, 1)
		tr := traces(t, Config{Endpoint: "http://hangs", Ratio: 1, Timeout: time.Hour}, transport(func(q *http.Request) (*http.Response, error) {
			select {
			case asked <- struct{}{}:
			default:
			}
			<-q.Context().Done()
			return nil, q.Context().Err()
		}))
		end(tr, batch)
		<-asked
		began := time.Now()
		end(tr, 10*queued)
		if took := time.Since(began); took != 0 {
			t.Errorf("want requests that do not wait, got %s", took)
		}
		if s := tr.Stats(); s.Waiting != queued || s.Dropped != 9*queued || s.Exported != 0 {
			t.Errorf("want %d waiting and %d dropped, got %+v", queued, 9*queued, s)
		}
		tr.Close()
		if s := tr.Stats(); s.Waiting != 0 || s.Failed != batch+queued || time.Since(began) > closes {
			t.Errorf("want %d failed within %s, got %+v after %s", batch+queued, closes, s, time.Since(began))
		}
	})
}
