package host_test

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	commonpb "go.opentelemetry.io/proto/otlp/common/v1"
	tracepb "go.opentelemetry.io/proto/otlp/trace/v1"
	"google.golang.org/protobuf/proto"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host"
	"github.com/kvhost/kvhost/host/client"
	"github.com/kvhost/kvhost/host/internal/config"
	"github.com/kvhost/kvhost/host/internal/testkit/hosttest"
	"github.com/kvhost/kvhost/host/kv"
)

// exports is a receiver of OTLP: spans as OpenTelemetry's generated code reads them.
type exports struct {
	*testing.T
	*httptest.Server
	came   chan *tracepb.TracesData
	tenant chan string
}

func receive(t *testing.T) *exports {
	e := &exports{T: t, came: make(chan *tracepb.TracesData, 100), tenant: make(chan string, 100)}
	e.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		var d tracepb.TracesData
		if err != nil || r.URL.Path != "/v1/traces" || r.Method != http.MethodPost || proto.Unmarshal(body, &d) != nil {
			t.Errorf("export by %s to %s: %v", r.Method, r.URL.Path, err)
			return
		}
		e.tenant <- r.Header.Get("X-Tenant")
		e.came <- &d
	}))
	t.Cleanup(e.Close)
	return e
}

// named waits until so many spans of a name came, and returns all that came.
func (e *exports) named(name string, n int) (all []*tracepb.Span) {
	e.Helper()
	for have := 0; have < n; {
		d := <-e.came
		for _, rs := range d.ResourceSpans {
			if got := text(rs.Resource.Attributes, "service.name"); got != "kvhost" {
				e.Errorf("service.name %q", got)
			}
			for _, ss := range rs.ScopeSpans {
				for _, s := range ss.Spans {
					all = append(all, s)
					if s.Name == name {
						have++
					}
				}
			}
		}
	}
	return all
}

func find(t *testing.T, all []*tracepb.Span, name string) *tracepb.Span {
	t.Helper()
	i := slices.IndexFunc(all, func(s *tracepb.Span) bool { return s.Name == name })
	if i < 0 {
		t.Fatalf("no span %s among %d", name, len(all))
	}
	return all[i]
}

// text is an attribute's value as a text.
func text(list []*commonpb.KeyValue, key string) string {
	for _, a := range list {
		if a.GetKey() == key {
			if s := a.GetValue().GetStringValue(); s != "" {
				return s
			}
			return fmt.Sprint(a.GetValue().GetIntValue())
		}
	}
	return ""
}

// tracedClient is a client with memory for four chunks, whose context names a span.
type tracedClient struct {
	*hosttest.Client
	*testing.T
	keys []kv.Key
}

func work(t *testing.T, h *host.Host) *tracedClient {
	t.Helper()
	w := &tracedClient{Client: dial(t, h), T: t}
	for i := range 4 {
		w.keys = append(w.keys, kv.Key{byte(i + 1), 2, 3})
	}
	return w
}

func (w *tracedClient) store(ctx context.Context) {
	w.Helper()
	var chunks []client.StoreChunk
	for i, key := range w.keys {
		chunks = append(chunks, client.StoreChunk{Key: key, Blocks: []uint32{uint32(2 * i), uint32(2*i + 1)}})
	}
	job, err := w.Store(ctx, 7, 0, chunks)
	testenv.OK(w, err)
	if r, err := job.Published(w.Context()); err != nil || r.Chunks[0].Err != nil {
		w.Fatal(r, err)
	}
}

func (w *tracedClient) lookup(ctx context.Context) *client.Lookup {
	w.Helper()
	l, err := w.Lookup(ctx, client.LookupRequest{Request: 8, Keys: w.keys})
	testenv.OK(w, err)
	return l
}

func (w *tracedClient) load(ctx context.Context, l *client.Lookup, layers bool) client.LoadResult {
	w.Helper()
	var chunks []client.LoadChunk
	for i := range l.Hits() {
		chunks = append(chunks, client.LoadChunk{Index: i, Blocks: []uint32{uint32(2 * i), uint32(2*i + 1)}})
	}
	var opt client.LoadOptions
	if layers {
		opt.Layers = func(uint32, []int) {}
	}
	job, err := w.Load(ctx, l, chunks, opt)
	testenv.OK(w, err)
	r, err := job.Wait(w.Context())
	testenv.OK(w, err)
	return r
}

const (
	traceID = "4bf92f3577b34da6a3ce929d0e0e4736"
	spanID  = "00f067aa0ba902b7"
)

// tracedHost is a host that exports spans of requests that clients have sampled.
func tracedHost(t *testing.T, to string) (*host.Host, *config.Config) {
	t.Helper()
	c := configuration(t)
	c.OTLP = config.OTLP{Endpoint: to, HeadersFile: filepath.Join(filepath.Dir(c.Socket), "headers")}
	testenv.OK(t, os.WriteFile(c.OTLP.HeadersFile, []byte("X-Tenant: one\n"), 0o600))
	c.Roots[0].Level = 1
	testenv.OK(t, c.Validate())
	h, _ := hosttest.Start(t, c)
	return h, c
}

// Requests of a real client become spans that a receiver of OTLP reads: with their parents, what they did, where, and what failed.
func TestSpansOfRequests(t *testing.T) {
	e := receive(t)
	h, c := tracedHost(t, e.URL)
	w := work(t, h)
	sampled := client.WithTraceparent(t.Context(), "00-"+traceID+"-"+spanID+"-01")
	w.store(sampled)
	w.load(t.Context(), w.lookup(t.Context()), false) // not sampled: nothing of it may come
	w.load(t.Context(), w.lookup(sampled), false)     // follows its lookup
	all := e.named("kvhost.load", 1)
	if tenant := <-e.tenant; tenant != "one" {
		t.Errorf("header %q, want that of the file", tenant)
	}
	if len(all) != 5 {
		t.Errorf("%d spans, want a store, a lookup, a load and two of pieces", len(all))
	}
	store, lookup, load := find(t, all, "kvhost.store"), find(t, all, "kvhost.lookup"), find(t, all, "kvhost.load")
	for _, s := range all {
		if hex.EncodeToString(s.TraceId) != traceID || s.EndTimeUnixNano < s.StartTimeUnixNano || s.Status.GetCode() != 0 {
			t.Errorf("span: got %v, want it in the client's trace without an error", s)
		}
	}
	pieces := map[*tracepb.Span]string{store: "kvhost.write", load: "kvhost.read"}
	for s, parent := range map[*tracepb.Span]string{store: spanID, lookup: spanID, load: hex.EncodeToString(lookup.SpanId)} {
		if hex.EncodeToString(s.ParentSpanId) != parent || s.Kind != tracepb.Span_SPAN_KIND_SERVER {
			t.Errorf("%s has the parent %x, want %s", s.Name, s.ParentSpanId, parent)
		}
		for key, want := range map[string]string{"kvhost.model": "m", "kvhost.tenant": "0", "kvhost.engine": "e"} {
			if got := text(s.Attributes, key); got != want {
				t.Errorf("%s: %s is %q, want %q", s.Name, key, got, want)
			}
		}
		if text(s.Attributes, "kvhost.namespace") == "" {
			t.Errorf("%s has no namespace", s.Name)
		}
		name, ok := pieces[s]
		if !ok {
			continue
		}
		p := find(t, all, name)
		if hex.EncodeToString(p.ParentSpanId) != hex.EncodeToString(s.SpanId) || p.StartTimeUnixNano < s.StartTimeUnixNano {
			t.Errorf("%s is no part of %s", name, s.Name)
		}
		for key, want := range map[string]string{"kvhost.root": c.Roots[0].Path, "kvhost.level": "1", "kvhost.route": "staged",
			"kvhost.pieces": "4", "kvhost.failed": "0"} {
			if got := text(p.Attributes, key); got != want {
				t.Errorf("%s: %s is %q, want %q", name, key, got, want)
			}
		}
	}
	for _, a := range []struct {
		of        *tracepb.Span
		key, want string
	}{
		{store, "kvhost.stored", "4"}, {store, "kvhost.outcome", "ok"}, {store, "kvhost.bytes", fmt.Sprint(16 * 8192)},
		{store, "kvhost.request", "7"},
		{lookup, "kvhost.keys", "4"}, {lookup, "kvhost.hits", "4"}, {lookup, "kvhost.outcome", "hit"},
		{load, "kvhost.chunks", "4"}, {load, "kvhost.bytes", fmt.Sprint(16 * 8192)}, {load, "kvhost.outcome", "ok"},
	} {
		if got := text(a.of.Attributes, a.key); got != a.want {
			t.Errorf("%s: %s is %q, want %q", a.of.Name, a.key, got, a.want)
		}
	}
	if len(store.Events) != 2 || store.Events[0].Name != "reserved" || store.Events[1].Name != "blocks read" {
		t.Errorf("events of the store: %v", store.Events)
	}

	// They count once the collector's answer has come.
	awaitMetric(t, h, `kvhost_otlp_spans_total{result="exported"}`, float64(len(all)))

	later := time.Now().Add(time.Hour)
	testenv.OK(t, errors.Join(os.WriteFile(c.OTLP.HeadersFile, []byte("X-Tenant: two\n"), 0o600), os.Chtimes(c.OTLP.HeadersFile, later, later)))
	testenv.OK(t, w.lookup(sampled).Release(t.Context()))
	e.named("kvhost.lookup", 1)
	var last string
	for len(e.tenant) > 0 {
		last = <-e.tenant
	}
	if last != "two" {
		t.Errorf("header %q after its file was renewed, want that of the file", last)
	}

	// A file is damaged. A load that names its own parent says so, and that it is linked to its lookup.
	damage(t, c.Roots[0].Path)
	r := w.load(client.WithTraceparent(t.Context(), "00-"+traceID+"-aaaaaaaaaaaaaaaa-01"), w.lookup(sampled), true)
	if len(r.Failed) == 0 {
		t.Fatal("no block of a damaged file failed")
	}
	if _, err := w.Lookup(sampled, client.LookupRequest{Group: 9, Keys: w.keys}); err == nil {
		t.Fatal("a group that is not there was looked up")
	}
	if _, err := w.Discard(sampled, 0, w.keys[3:]); err != nil {
		t.Fatal(err)
	}
	all = e.named("kvhost.discard", 1)
	load, lookup = find(t, all, "kvhost.load"), find(t, all, "kvhost.lookup")
	if load.Status.GetCode() != tracepb.Status_STATUS_CODE_ERROR || text(load.Attributes, "error.type") != "DAMAGED" ||
		text(load.Attributes, "kvhost.outcome") != "partial" || load.Status.GetMessage() == "" {
		t.Errorf("the load of a damaged file: %v", load)
	}
	if hex.EncodeToString(load.ParentSpanId) != "aaaaaaaaaaaaaaaa" || len(load.Links) != 1 ||
		hex.EncodeToString(load.Links[0].SpanId) != hex.EncodeToString(lookup.SpanId) {
		t.Errorf("parent %x, links %v", load.ParentSpanId, load.Links)
	}
	if p := find(t, all, "kvhost.read"); text(p.Attributes, "kvhost.failed") != "1" || p.Status.GetCode() != tracepb.Status_STATUS_CODE_ERROR {
		t.Errorf("the pieces: %v", p)
	}
	refused := all[slices.IndexFunc(all, func(s *tracepb.Span) bool { return text(s.Attributes, "kvhost.outcome") == "refused" })]
	if refused.Name != "kvhost.lookup" || text(refused.Attributes, "error.type") != "UNKNOWN" || refused.Status.GetMessage() == "" {
		t.Errorf("a refused lookup: %v", refused)
	}
	if got := text(find(t, all, "kvhost.discard").Attributes, "kvhost.removed"); got != "1" {
		t.Errorf("%s removed", got)
	}
}

// damage changes a byte in the first piece of a root.
func damage(t *testing.T, root string) {
	t.Helper()
	done := false
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil || done || !strings.HasSuffix(path, ".kv") {
			return err
		}
		f, err := os.OpenFile(path, os.O_RDWR, 0)
		if err != nil {
			return err
		}
		defer f.Close()
		done = true
		_, err = f.WriteAt([]byte("damage"), 3*4096)
		return err
	})
	if err != nil || !done {
		t.Fatal("no file was damaged", err)
	}
}
