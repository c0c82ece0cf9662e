package spans

import (
	"bytes"
	"context"
	"encoding/hex"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	tracepb "go.opentelemetry.io/proto/otlp/trace/v1"
	"google.golang.org/protobuf/proto"
)

const traceparent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"

func newTracer(c Config) *Tracer {
	t := New("test", Resource("test", "here", func(string) string { return "" }), slog.New(slog.DiscardHandler))
	t.Set(c)
	return t
}

// A span is what OpenTelemetry's own code reads.
func TestEncoding(t *testing.T) {
	tr := New("1.2", nil, slog.New(slog.DiscardHandler))
	tr.current.Store(&settings{Config: Config{Ratio: 1}})
	s := tr.Begin(traceparent)
	from := time.Unix(100, 5)
	long := strings.Repeat("x", 2*longestText)
	link := s.Child()
	got := decode(t, data([]Attribute{Text("service.name", "kvhost")}, "1.2", [][]byte{s.encode(&Ended{
		Name: "kvhost.load", Kind: Server, From: from, To: from.Add(time.Second), Failure: "bad \xff bytes", Code: "DAMAGED",
		Attributes: []Attribute{Number("n", -1), Numbers("list", []int64{1, 300, -7}), Text("long", long)},
		Encoded:    Encode(Text("kvhost.model", "m")), Link: &link,
		Events: []Event{{Name: "never"}, {Name: "read", At: from.Add(time.Millisecond)}},
	})}))
	scope := got.ResourceSpans[0].ScopeSpans[0]
	if v := got.ResourceSpans[0].Resource.Attributes[0].Value.GetStringValue(); v != "kvhost" || scope.Scope.Version != "1.2" {
		t.Errorf("resource %q, scope %v", v, scope.Scope)
	}
	p := scope.Spans[0]
	if p.Name != "kvhost.load" || p.Kind != tracepb.Span_SPAN_KIND_SERVER || p.StartTimeUnixNano != 100e9+5 || p.EndTimeUnixNano != 101e9+5 {
		t.Errorf("%v", p)
	}
	if hex.EncodeToString(p.TraceId) != "4bf92f3577b34da6a3ce929d0e0e4736" || hex.EncodeToString(p.ParentSpanId) != "00f067aa0ba902b7" || p.Flags != 0x301 {
		t.Errorf("trace %x, parent %x, flags %#x", p.TraceId, p.ParentSpanId, p.Flags)
	}
	if p.Status.GetCode() != tracepb.Status_STATUS_CODE_ERROR || p.Status.GetMessage() != "bad \uFFFD bytes" {
		t.Errorf("status %v", p.Status)
	}
	if len(p.Events) != 1 || p.Events[0].Name != "read" || len(p.Links) != 1 || !bytes.Equal(p.Links[0].TraceId, p.TraceId) {
		t.Errorf("events %v, links %v", p.Events, p.Links)
	}
	at := map[string]int{}
	for i, a := range p.Attributes {
		at[a.Key] = i
	}
	value := func(key string) string { return p.Attributes[at[key]].Value.String() }
	list := p.Attributes[at["list"]].Value.GetArrayValue().GetValues()
	if p.Attributes[at["n"]].Value.GetIntValue() != -1 || len(list) != 3 || list[2].GetIntValue() != -7 ||
		len(p.Attributes[at["long"]].Value.GetStringValue()) != longestText || !strings.Contains(value("error.type"), "DAMAGED") ||
		!strings.Contains(value("kvhost.model"), "m") || len(at) != 5 {
		t.Errorf("attributes %v", p.Attributes)
	}
}

func decode(t *testing.T, body []byte) *tracepb.TracesData {
	t.Helper()
	var got tracepb.TracesData
	if err := proto.Unmarshal(body, &got); err != nil {
		t.Fatal(err)
	}
	if len(got.ProtoReflect().GetUnknown()) > 0 {
		t.Fatal("unknown fields")
	}
	return &got
}

// The client's decision counts; without one the ratio does.
func TestSampling(t *testing.T) {
	count := func(ratio float64, parent string) (n int) {
		tr := New("", nil, nil)
		tr.current.Store(&settings{Config: Config{Ratio: ratio}})
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
	} {
		if n := count(c.ratio, c.parent); n < c.low || n > c.top {
			t.Errorf("ratio %v, parent %q: %d of 10000, want %d to %d", c.ratio, c.parent, n, c.low, c.top)
		}
	}
	var none *Tracer
	if s := none.Begin(traceparent); s.On() {
		t.Error("no tracer makes spans")
	}
}

func TestTraceparent(t *testing.T) {
	for text, ok := range map[string]bool{
		traceparent: true,
		"":          false,
		"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7":    false,
		strings.ToUpper(traceparent):                              false,
		"ff" + traceparent[2:]:                                    false,
		traceparent + "-more":                                     false, // version 0 has no more
		"cc" + traceparent[2:] + "-more":                          true,
		"cc" + traceparent[2:] + "more":                           false,
		"00-00000000000000000000000000000000-00f067aa0ba902b7-01": false,
		"00-4bf92f3577b34da6a3ce929d0e0e4736-0000000000000000-01": false,
		"00-4bf92f3577b34da6a3ce929d0e0e473g-00f067aa0ba902b7-01": false,
	} {
		if _, got := parse(text); got != ok {
			t.Errorf("%q: %v, want %v", text, got, ok)
		}
	}
}

func FuzzTraceparent(f *testing.F) {
	f.Add(traceparent)
	f.Fuzz(func(t *testing.T, text string) {
		p, ok := parse(text)
		if !ok {
			return
		}
		if !strings.HasPrefix(text[3:], hex.EncodeToString(p.trace[:])+"-"+hex.EncodeToString(p.id[:])+"-") || p.trace == [16]byte{} || p.id == [8]byte{} {
			t.Errorf("%q became %x and %x", text, p.trace, p.id)
		}
	})
}

func FuzzRejected(f *testing.F) {
	f.Add(response(3))
	f.Fuzz(func(t *testing.T, answer []byte) {
		if n := rejectedOf(answer); n < 0 {
			t.Errorf("%d rejected", n)
		}
	})
}

// response is an ExportTraceServiceResponse.
func response(rejected uint64) []byte {
	return raw(nil, 1, text(number(nil, 1, rejected), 2, "why"))
}

func FuzzHeaders(f *testing.F) {
	f.Add([]byte("Authorization: Bearer x\n# no\n\nX-Tenant: a\n"))
	f.Fuzz(func(t *testing.T, file []byte) {
		headers, err := Headers(file)
		if err != nil {
			return
		}
		q, err := http.NewRequest(http.MethodPost, "http://127.0.0.1/", nil)
		if err != nil {
			t.Fatal(err)
		}
		q.Header = headers
		if err := q.Write(io.Discard); err != nil {
			t.Errorf("%q is taken, and cannot be sent: %v", file, err)
		}
	})
}

func TestHeaders(t *testing.T) {
	h, err := Headers([]byte("# secrets\nauthorization: Bearer abc:def \n\nX-Scope-OrgID: t\n"))
	if err != nil || http.Header(h).Get("Authorization") != "Bearer abc:def" || http.Header(h).Get("X-Scope-Orgid") != "t" {
		t.Errorf("%v, %v", h, err)
	}
	for _, text := range []string{"secret", "a b: secret", ": secret", "X: secret\x01", "Host: secret", "content-type: secret"} {
		if _, err := Headers([]byte(text)); err == nil || strings.Contains(err.Error(), "secret") {
			t.Errorf("%q: %v", text, err)
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
			t.Errorf("%q: %q, %v", text, got, err)
		}
		if err != nil && strings.Contains(text, "user:") && strings.Contains(err.Error(), "secret") {
			t.Errorf("%v repeats the password", err)
		}
	}
}

func TestResource(t *testing.T) {
	env := map[string]string{"OTEL_SERVICE_NAME": "mine", "OTEL_RESOURCE_ATTRIBUTES": "service.name=other,team=a%20b,bad,x=%zz"}
	got := map[string]string{}
	for _, a := range Resource("v", "", func(k string) string { return env[k] }) {
		got[a.Key] = a.text
	}
	if len(got) != 3 || got["service.name"] != "mine" || got["team"] != "a b" || got["service.version"] != "v" {
		t.Errorf("%v", got)
	}
}

// A request that gets no span costs nothing.
func TestOffAllocatesNothing(t *testing.T) {
	tr := New("", nil, slog.New(slog.DiscardHandler))
	begin := func() {
		s := tr.Begin(traceparent)
		s.End(&Ended{Name: "x"})
	}
	if n := testing.AllocsPerRun(1000, begin); n != 0 {
		t.Errorf("%v allocations when off", n)
	}
	tr.current.Store(&settings{Config: Config{Ratio: 0}})
	parent := ""
	begin = func() {
		s := tr.Begin(parent)
		s.End(&Ended{Name: "x"})
	}
	if n := testing.AllocsPerRun(1000, begin); n != 0 {
		t.Errorf("%v allocations when not sampled", n)
	}
}

// collector answers exports, and tells of each.
type collector struct {
	*httptest.Server
	answer func(http.ResponseWriter)

	mu     sync.Mutex
	spans  int
	header http.Header
}

func newCollector(t *testing.T, answer func(http.ResponseWriter)) *collector {
	c := &collector{answer: answer}
	c.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		if err != nil {
			return
		}
		n := 0
		for _, rs := range decode(t, body).ResourceSpans {
			for _, ss := range rs.ScopeSpans {
				n += len(ss.Spans)
			}
		}
		c.mu.Lock()
		c.spans, c.header = c.spans+n, r.Header
		c.mu.Unlock()
		if c.answer != nil {
			c.answer(w)
		}
	}))
	t.Cleanup(c.Close)
	return c
}

func (c *collector) seen() (int, http.Header) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.spans, c.header
}

func end(tr *Tracer, n int) {
	for range n {
		s := tr.Begin("")
		s.End(&Ended{Name: "x", From: time.Now(), To: time.Now()})
	}
}

func TestClosingSendsWhatIsQueued(t *testing.T) {
	c := newCollector(t, nil)
	tr := newTracer(Config{Endpoint: c.URL + "/v1/traces", Ratio: 1, Timeout: time.Minute, Headers: http.Header{"X-Tenant": {"a"}}})
	end(tr, 700)
	tr.Close()
	n, h := c.seen()
	if n != 700 || h.Get("X-Tenant") != "a" || h.Get("Content-Type") != "application/x-protobuf" {
		t.Errorf("%d spans, %v", n, h)
	}
	if s := tr.Stats(); s != (Stats{Exported: 700}) {
		t.Errorf("%+v", s)
	}
	tr.Set(Config{Endpoint: c.URL, Ratio: 1}) // too late
	if s := tr.Begin(""); s.On() {
		t.Error("a closed tracer begins spans")
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
		{"some of them", func(w http.ResponseWriter) { w.Write(response(4)) }, Stats{Exported: 6, Failed: 4}},
		{"more than there are", func(w http.ResponseWriter) { w.Write(response(1 << 60)) }, Stats{Failed: 10}},
		{"a redirect", func(w http.ResponseWriter) { w.Header().Set("Location", "/x"); w.WriteHeader(http.StatusFound) }, Stats{Failed: 10}},
		{"nonsense, and takes them", func(w http.ResponseWriter) { w.Write([]byte("\xff\xff")) }, Stats{Exported: 10}},
	} {
		t.Run(c.what, func(t *testing.T) {
			col := newCollector(t, c.answer)
			tr := newTracer(Config{Endpoint: col.URL, Ratio: 1, Timeout: time.Minute})
			end(tr, 10)
			tr.Close()
			if n, _ := col.seen(); n != 10 || tr.Stats() != c.want {
				t.Errorf("%d spans came, %+v, want %+v", n, tr.Stats(), c.want)
			}
		})
	}
}

// transport answers without a network, so that time can be a bubble's.
type transport func(*http.Request) (*http.Response, error)

func (f transport) RoundTrip(q *http.Request) (*http.Response, error) { return f(q) }

// A collector that is busy is asked again after as long as it wants, and new settings do not wait for that.
func TestRetries(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var at []time.Duration
		began := time.Now()
		tr := newTracer(Config{Endpoint: "http://a", Ratio: 1, Timeout: time.Minute})
		tr.current.Load().client.Transport = transport(func(q *http.Request) (*http.Response, error) {
			at = append(at, time.Since(began))
			r := &http.Response{StatusCode: http.StatusServiceUnavailable, Header: http.Header{}, Body: http.NoBody, Request: q}
			switch len(at) {
			case 1:
				r.Header.Set("Retry-After", "7")
			case 3:
				r.StatusCode = http.StatusOK
			}
			return r, nil
		})
		end(tr, 3)
		time.Sleep(time.Minute) // of the bubble
		synctest.Wait()
		if len(at) != 3 || at[0] != delay || at[1] != delay+7*time.Second || at[2] != delay+9*time.Second {
			t.Errorf("attempts at %v", at)
		}
		if s := tr.Stats(); s.Exported != 3 || s.Failed != 0 {
			t.Errorf("%+v", s)
		}
		tr.Close()
	})
}

// A collector that hangs costs neither requests their time nor the host its memory; what it does not take is counted; and it can
// be replaced at once.
func TestHangingCollector(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		tr := newTracer(Config{Endpoint: "http://hangs", Ratio: 1, Timeout: time.Hour})
		asked := make(chan struct{}, 1)
		tr.current.Load().client.Transport = transport(func(q *http.Request) (*http.Response, error) {
			select {
			case asked <- struct{}{}:
			default:
			}
			<-q.Context().Done()
			return nil, q.Context().Err()
		})
		end(tr, batch)
		<-asked
		began := time.Now()
		end(tr, 10*queued)
		if took := time.Since(began); took != 0 {
			t.Errorf("requests waited %s", took)
		}
		if s := tr.Stats(); s.Waiting != queued || s.Dropped != 9*queued || s.Exported != 0 {
			t.Errorf("%+v", s)
		}
		took := 0
		next := Config{Endpoint: "http://takes", Ratio: 1, Timeout: time.Second}
		tr.mu.Lock() // as Set, with a transport of the test's
		s := &settings{Config: next, client: &http.Client{Transport: transport(func(q *http.Request) (*http.Response, error) {
			body, err := io.ReadAll(q.Body)
			took += len(decode(t, body).ResourceSpans[0].ScopeSpans[0].Spans)
			return &http.Response{StatusCode: http.StatusOK, Body: http.NoBody, Request: q}, err
		})}}
		s.replaced, s.replace = context.WithCancel(context.Background())
		tr.put(s)
		tr.mu.Unlock()
		synctest.Wait()
		tr.Close()
		if took != batch+queued || time.Since(began) > closes {
			t.Errorf("%d spans came after %s", took, time.Since(began))
		}
	})
}

// The end of a host waits a moment for a collector that hangs.
func TestClosingDoesNotHang(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		tr := newTracer(Config{Endpoint: "http://hangs", Ratio: 1, Timeout: time.Hour})
		tr.current.Load().client.Transport = transport(func(q *http.Request) (*http.Response, error) {
			<-q.Context().Done()
			return nil, q.Context().Err()
		})
		end(tr, 2*batch)
		synctest.Wait()
		began := time.Now()
		tr.Close()
		if took := time.Since(began); took > closes {
			t.Errorf("closed after %s", took)
		}
		if s := tr.Stats(); s.Failed != 2*batch {
			t.Errorf("%+v", s)
		}
		synctest.Wait()
	})
}

// Spans that are switched off leave no goroutine and no queue behind.
func TestSwitchedOff(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		tr := newTracer(Config{Endpoint: "http://hangs", Ratio: 1, Timeout: time.Hour})
		tr.current.Load().client.Transport = transport(func(q *http.Request) (*http.Response, error) {
			<-q.Context().Done()
			return nil, q.Context().Err()
		})
		end(tr, batch+10)
		synctest.Wait()
		tr.Set(Config{})
		time.Sleep(2 * delay) // of the bubble
		synctest.Wait()
		if s := tr.Stats(); s.Waiting != 0 || s.Failed != batch+10 {
			t.Errorf("%+v", s)
		}
		if s := tr.Begin(""); s.On() {
			t.Error("a span began")
		}
		tr.Close()
	})
}

func BenchmarkSpan(b *testing.B) {
	session := Encode(Text("kvhost.model", "meta-llama/Llama-3.1-70B"), Text("kvhost.engine", "engine-0"), Number("kvhost.tenant", 1))
	for _, c := range []struct {
		name  string
		ratio float64
	}{{"off", -1}, {"ratio=0.01", 0.01}, {"ratio=1", 1}} {
		b.Run(c.name, func(b *testing.B) {
			tr := New("", nil, slog.New(slog.DiscardHandler))
			if c.ratio >= 0 {
				tr.current.Store(&settings{Config: Config{Ratio: c.ratio}})
			}
			stop := make(chan struct{})
			defer close(stop)
			go func() {
				for {
					select {
					case <-tr.queue:
					case <-stop:
						return
					}
				}
			}()
			b.ReportAllocs()
			for b.Loop() {
				if s := tr.Begin(""); s.On() {
					now := time.Now()
					s.End(&Ended{Name: "kvhost.lookup", Kind: Server, From: now, To: now, Encoded: session, Attributes: []Attribute{
						Number("kvhost.keys", 128), Number("kvhost.hits", 100), Number("kvhost.bytes", 1<<30), Text("kvhost.outcome", "partial"),
					}})
				}
			}
		})
	}
}
