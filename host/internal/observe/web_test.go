package observe

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/internal/budget"
	"github.com/kvhost/kvhost/host/internal/proto"
	"github.com/kvhost/kvhost/host/internal/testkit/certificates"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"google.golang.org/protobuf/types/known/durationpb"
)

// serve starts a server that ends with the test.
func serve(t *testing.T, cfg Config) *Server {
	t.Helper()
	cfg.Listen = "127.0.0.1:0"
	if cfg.Registry == nil {
		cfg.Registry = prometheus.NewRegistry()
		cfg.Registry.MustRegister(collectors.NewGoCollector())
	}
	if cfg.Status == nil {
		cfg.Status = func() *proto.StatusResponse { return &proto.StatusResponse{Version: "v7"} }
	}
	if cfg.Connections == nil {
		cfg.Connections = budget.OfHTTP()
	}
	cfg.Log = slog.New(slog.DiscardHandler)
	s, err := Listen(cfg)
	testenv.OK(t, err)
	ctx, stop := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- s.Serve(ctx) }()
	t.Cleanup(func() {
		stop()
		testenv.NoError(t, <-ended)
		testenv.NoError(t, s.Close())
	})
	return s
}

func get(t *testing.T, c *http.Client, url, token string) (code int, body string, h http.Header) {
	t.Helper()
	q, err := http.NewRequest("GET", url, nil)
	testenv.OK(t, err)
	if token != "" {
		q.Header.Set("Authorization", token)
	}
	r, err := c.Do(q)
	testenv.OK(t, err)
	defer r.Body.Close()
	b, err := io.ReadAll(r.Body)
	testenv.OK(t, err)
	return r.StatusCode, string(b), r.Header
}

func TestProbes(t *testing.T) {
	var why atomic.Pointer[[]string]
	why.Store(&[]string{"root /a is out of service: gone", "starting"})
	s := serve(t, Config{Status: func() *proto.StatusResponse { return &proto.StatusResponse{NotReady: *why.Load()} }})
	base := "http://" + s.Addr()
	if code, body, _ := get(t, http.DefaultClient, base+"/livez", ""); code != 200 || body != "ok\n" {
		t.Errorf("/livez: %d %q", code, body)
	}
	if code, body, _ := get(t, http.DefaultClient, base+"/readyz", ""); code != 503 || body != "root /a is out of service: gone\nstarting\n" {
		t.Errorf("/readyz: %d %q", code, body)
	}
	why.Store(&[]string{})
	if code, body, _ := get(t, http.DefaultClient, base+"/readyz", ""); code != 200 || body != "ok\n" {
		t.Errorf("/readyz: %d %q", code, body)
	}
}

func TestPaths(t *testing.T) {
	s := serve(t, Config{})
	for path, want := range map[string]struct {
		code int
		text string
	}{
		"/":                {200, "<title>kvhost"},
		"/page.js":         {200, "/status"},
		"/page.css":        {200, "color-scheme"},
		"/metrics":         {200, "go_goroutines"},
		"/status":          {200, `"version":"v7"`},
		"/page/index.html": {404, ""},
		"/debug/pprof/":    {404, ""},
		"/healthz":         {404, ""},
	} {
		code, body, h := get(t, http.DefaultClient, "http://"+s.Addr()+path, "")
		if code != want.code || !strings.Contains(body, want.text) {
			t.Errorf("%s: %d, want %d with %q", path, code, want.code, want.text)
		}
		if path == "/" && !strings.Contains(h.Get("Content-Security-Policy"), "default-src 'none'") {
			t.Errorf("%s: no content security policy in %v", path, h)
		}
	}
	r, err := http.Post("http://"+s.Addr()+"/status", "text/plain", strings.NewReader("x"))
	testenv.OK(t, err)
	r.Body.Close()
	if r.StatusCode != http.StatusMethodNotAllowed {
		t.Errorf("POST: %d, want 405", r.StatusCode)
	}
	_, body, _ := get(t, http.DefaultClient, "http://"+s.Addr()+"/status", "")
	if !json.Valid([]byte(body)) {
		t.Errorf("/status is not JSON: %q", body)
	}
}

// The manual is the one that is installed, as of now and without what is outside of its directory; without one the public one.
func TestManual(t *testing.T) {
	parent := t.TempDir()
	dir := filepath.Join(parent, "manual")
	s := serve(t, Config{TokenFile: write(t, "0123456789abcdef-secret\n"), manuals: []string{filepath.Join(parent, "none"), dir}})
	client := &http.Client{CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
	asked := func(path string) (int, string, http.Header) {
		t.Helper()
		return get(t, client, "http://"+s.Addr()+path, "")
	}
	if code, _, h := asked("/manual/operate.html"); code != http.StatusFound || h.Get("Location") != manualElsewhere {
		t.Errorf("without a manual: %d, %v, want the public one", code, h)
	}
	testenv.OK(t, os.Mkdir(dir, 0o755))
	testenv.OK(t, os.WriteFile(filepath.Join(dir, "index.html"), []byte("the manual"), 0o644))
	testenv.OK(t, os.WriteFile(filepath.Join(parent, "secret"), []byte("secret"), 0o644))
	testenv.OK(t, os.Symlink("../secret", filepath.Join(dir, "link")))
	if code, body, h := asked("/manual/"); code != http.StatusOK || body != "the manual" || h.Get("Content-Security-Policy") != contentPolicy {
		t.Errorf("the manual: %d, %q, %v", code, body, h)
	}
	for _, path := range []string{"/manual/link", "/manual/../secret", "/manual/%2e%2e/secret", "/manual/none.html"} {
		if code, body, _ := asked(path); code == http.StatusOK || strings.Contains(body, "secret") && !strings.Contains(body, "/secret") {
			t.Errorf("%s: %d, %q, want nothing from outside the manual", path, code, body)
		}
	}
	if _, page, _ := asked("/"); !strings.Contains(page, `href="manual/`) {
		t.Error("the page does not lead to the manual")
	}
}

func write(t *testing.T, text string) string {
	t.Helper()
	name := filepath.Join(t.TempDir(), "f")
	testenv.OK(t, os.WriteFile(name, []byte(text), 0o600))
	return name
}

func TestToken(t *testing.T) {
	const token = "0123456789abcdef-secret"
	s := serve(t, Config{TokenFile: write(t, token+"\n"), Profiles: true})
	base := "http://" + s.Addr()
	for _, path := range []string{"/metrics", "/status", "/tables", "/history", "/debug/pprof/cmdline"} {
		for _, c := range []struct {
			header string
			code   int
		}{{"", 401}, {"Bearer ", 401}, {"Bearer " + token + "x", 401}, {"Basic " + token, 401}, {token, 401}, {"Bearer " + token, 200}} {
			if code, body, _ := get(t, http.DefaultClient, base+path, c.header); code != c.code || strings.Contains(body, token) {
				t.Errorf("%s with %q: %d, want %d", path, c.header, code, c.code)
			}
		}
	}
	for _, path := range []string{"/livez", "/readyz", "/"} {
		if code, _, _ := get(t, http.DefaultClient, base+path, ""); code != 200 {
			t.Errorf("%s without a token: %d", path, code)
		}
	}
}

// A token that its file no longer holds is withdrawn. A mount of a Secret replaces a link, and a file that is written in place
// may be half written.
func TestTokenIsRenewed(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "token")
	link := func(generation, text string) {
		t.Helper()
		to := filepath.Join(dir, generation)
		next := filepath.Join(dir, "next")
		testenv.OK(t, errors.Join(os.WriteFile(to, []byte(text), 0o600), os.Symlink(to, next), os.Rename(next, file)))
	}
	const first, second, third = "0123456789abcdef-1", "0123456789abcdef-2", "0123456789abcdef-3"
	link("1", "\ufeff"+first+"\r\n")
	s := serve(t, Config{TokenFile: file})
	want := func(when, good, withdrawn string) {
		t.Helper()
		for token, code := range map[string]int{good: 200, withdrawn: 401} {
			if got, _, _ := get(t, http.DefaultClient, "http://"+s.Addr()+"/status", "Bearer "+token); got != code {
				t.Errorf("%s: got %d for %s, want %d", when, got, token, code)
			}
		}
	}
	want("at the start", first, second)
	link("2", second)
	want("after the link was replaced", second, first)
	for _, bad := range []string{"", "short", third + "\nand a line", third + "\x00"} {
		testenv.OK(t, os.WriteFile(file, []byte(bad), 0o600))
		later := time.Now().Add(time.Hour)
		testenv.OK(t, os.Chtimes(file, later, later))
		want(fmt.Sprintf("while the file holds %q", bad), second, third)
	}
	link("3", third)
	want("after it was written whole", third, second)
}

// pair writes a certificate for 127.0.0.1 with this serial number.
func pair(t *testing.T, dir string, serial int64) (cert, key string) {
	t.Helper()
	cert, key = filepath.Join(dir, "cert.pem"), filepath.Join(dir, "key.pem")
	certificates.New(t).Pair(t, cert, key, "127.0.0.1", x509.Certificate{SerialNumber: big.NewInt(serial)})
	return cert, key
}

// TestCertificate serves with TLS, refuses plain connections, and takes a renewed certificate without a restart.
func TestCertificate(t *testing.T) {
	dir := t.TempDir()
	cert, key := pair(t, dir, 1)
	s := serve(t, Config{CertFile: cert, KeyFile: key})
	client := &http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}}}
	if code, body, _ := get(t, client, "https://"+s.Addr()+"/livez", ""); code != 200 || body != "ok\n" {
		t.Fatalf("/livez over TLS: got %d %q", code, body)
	}
	if code, _, _ := get(t, http.DefaultClient, "http://"+s.Addr()+"/status", ""); code != http.StatusBadRequest {
		t.Errorf("plain HTTP: %d, want 400", code)
	}

	serial := func() int64 {
		c, err := tls.Dial("tcp", s.Addr(), &tls.Config{InsecureSkipVerify: true})
		testenv.OK(t, err)
		defer c.Close()
		return c.ConnectionState().PeerCertificates[0].SerialNumber.Int64()
	}
	renewed := func(name string) {
		later := time.Now().Add(time.Hour)
		testenv.OK(t, os.Chtimes(name, later, later))
	}
	testenv.OK(t, os.WriteFile(cert, []byte("half writ"), 0o600))
	renewed(cert)
	if serial() != 1 {
		t.Error("the old certificate was not kept while the new one is half written")
	}
	pair(t, dir, 2)
	renewed(key)
	if serial() != 2 {
		t.Error("the renewed certificate is not used")
	}
}

func TestListenErrors(t *testing.T) {
	running := serve(t, Config{})
	cert, key := pair(t, t.TempDir(), 1)
	for name, c := range map[string]struct {
		cfg  Config
		want error
	}{
		"in use":         {Config{Listen: running.Addr()}, ErrHTTP},
		"no such token":  {Config{Listen: "127.0.0.1:0", TokenFile: "/nonexistent"}, ErrCredential},
		"short token":    {Config{Listen: "127.0.0.1:0", TokenFile: write(t, "0123")}, ErrCredential},
		"token a fifo":   {Config{Listen: "127.0.0.1:0", TokenFile: "/dev/zero"}, ErrCredential},
		"no certificate": {Config{Listen: "127.0.0.1:0", CertFile: "/nonexistent", KeyFile: key}, ErrCredential},
		"key mixed up":   {Config{Listen: "127.0.0.1:0", CertFile: key, KeyFile: cert}, ErrCredential},
	} {
		c.cfg.Log = slog.New(slog.DiscardHandler)
		if s, err := Listen(c.cfg); !errors.Is(err, c.want) {
			t.Errorf("listen with %s: got %v, want %v", name, err, c.want)
			if err == nil {
				s.Close()
			}
		} else if process := fmt.Sprintf("in use by process %d;", os.Getpid()); name == "in use" && !strings.Contains(err.Error(), process) {
			t.Errorf("an address in use: want %q, got %v", process, err)
		}
	}
}

// until waits for what a server reaches by itself.
func until(t *testing.T, what string, cond func() bool) {
	t.Helper()
	testenv.Until(t, what, cond)
}

// Clients that ask and do not read hold a bounded number of connections, for a bounded time, and others get their answers.
func TestSlowReadersAreClosed(t *testing.T) {
	const most = 8
	body := strings.Repeat("x", 4<<20) // more than sockets hold
	crowd := func(clients int, timeout time.Duration) (s *Server, open *budget.Connections, list []net.Conn) {
		open = &budget.Connections{Max: most}
		s = serve(t, Config{
			Connections: open, period: time.Hour, timeout: timeout,
			Status: func() *proto.StatusResponse { return &proto.StatusResponse{Version: body} },
		})
		for range clients {
			c, err := net.Dial("tcp", s.Addr())
			testenv.OK(t, err)
			t.Cleanup(func() { _ = c.Close() })
			fmt.Fprintf(c, "GET /status HTTP/1.1\r\nHost: localhost\r\n\r\n")
			list = append(list, c)
		}
		return s, open, list
	}
	_, open, _ := crowd(100, time.Hour) // however long it takes them to come
	until(t, "the crowd's first connections are closed", func() bool { return open.Figures().Refused >= 100-most })
	if n := open.Figures().Held; n > most {
		t.Errorf("%d connections are open, want %d at most", n, most)
	}
	s, open, list := crowd(most, 200*time.Millisecond)
	for _, c := range list { // an answer that has begun, or its end
		_, _ = c.Read(make([]byte, 1))
	}
	until(t, "answers that are not read end", func() bool { return open.Figures().Held == 0 })
	for i, c := range list {
		if n, _ := io.Copy(io.Discard, c); n >= int64(len(body)) {
			t.Errorf("connection %d got all %d bytes after the time limit, want less", i, n)
		}
	}
	until(t, "/livez after the crowd", func() bool { // on a busy machine an answer may take longer than it may here
		r, err := http.Get("http://" + s.Addr() + "/livez")
		if err != nil {
			return false
		}
		defer r.Body.Close()
		got, err := io.ReadAll(r.Body)
		return err == nil && r.StatusCode == 200 && string(got) == "ok\n"
	})
}

// However many ask, the figures are read a few times in a period, and the last ones are for all.
func TestStatusIsReadForAll(t *testing.T) {
	var reads atomic.Int32
	s := serve(t, Config{Connections: &budget.Connections{Max: 64}, period: time.Hour, Status: func() *proto.StatusResponse {
		return &proto.StatusResponse{Version: fmt.Sprint("read ", reads.Add(1))}
	}})
	var work sync.WaitGroup
	for range 40 {
		work.Go(func() {
			for _, path := range []string{"/status", "/readyz"} {
				if code, _, _ := get(t, http.DefaultClient, "http://"+s.Addr()+path, ""); code != 200 {
					t.Errorf("%s: %d, want 200", path, code)
				}
			}
		})
	}
	work.Wait()
	if n := reads.Load(); n != mostReadings {
		t.Errorf("the status was read %d times for 80 requests, want %d", n, mostReadings)
	}
	if _, body, _ := get(t, http.DefaultClient, "http://"+s.Addr()+"/status", ""); !strings.Contains(body, fmt.Sprint("read ", mostReadings)) {
		t.Errorf("/status: %q, want the last reading", body)
	}
}

// Without a token, a name that can be another site's gets nothing, and neither does a page of another site.
func TestOtherSitesReadNothing(t *testing.T) {
	s := serve(t, Config{})
	ask := func(host, origin string) int {
		q, err := http.NewRequest("GET", "http://"+s.Addr()+"/status", nil)
		testenv.OK(t, err)
		q.Host = host
		if origin != "" {
			q.Header.Set("Origin", origin)
		}
		r, err := http.DefaultClient.Do(q)
		testenv.OK(t, err)
		r.Body.Close()
		return r.StatusCode
	}
	for _, c := range []struct {
		host, origin string
		want         int
	}{
		{s.Addr(), "", 200}, {"localhost:9476", "", 200}, {"localhost.:9476", "", 200}, {"localhost.", "", 200}, {"[::1]:9476", "", 200}, {"node-7", "", 200}, {"192.0.2.7:9476", "", 200},
		{s.Addr(), "http://" + s.Addr(), 200},
		{"rebound.example.com:9476", "", 403}, {"rebound.example.com", "", 403}, {"rebound.example.com.", "", 403}, {"127.0.0.1.example.com:9476", "", 403},
		{s.Addr(), "http://example.com", 403}, {s.Addr(), "null", 403}, {s.Addr(), "://", 403},
	} {
		if got := ask(c.host, c.origin); got != c.want {
			t.Errorf("Host %q, Origin %q: %d, want %d", c.host, c.origin, got, c.want)
		}
	}
}

// A label that is not UTF-8 leaves the other series, and its own, readable.
func TestLabelsAreUTF8(t *testing.T) {
	out := make(chan prometheus.Metric, 1)
	series(out).put(rootMemory, 1, "/mnt/\xff", "used")
	r := prometheus.NewRegistry()
	r.MustRegister(constant{<-out})
	s := serve(t, Config{Registry: r})
	if code, body, _ := get(t, http.DefaultClient, "http://"+s.Addr()+"/metrics", ""); code != 200 || !strings.Contains(body, `{root="/mnt/�",state="used"} 1`) {
		t.Errorf("/metrics: %d %q, want the series", code, body)
	}
}

// constant collects one metric.
type constant struct{ prometheus.Metric }

func (constant) Describe(chan<- *prometheus.Desc)       {}
func (c constant) Collect(out chan<- prometheus.Metric) { out <- c.Metric }

// The host keeps the last five minutes of what the page draws over time, and no more.
func TestHistoryIsTheLastFiveMinutesOfWhatIsDrawn(t *testing.T) {
	h := &history{}
	for n := range uint64(samplesKept + 7) {
		s := status(n)
		s.Uptime = durationpb.New(time.Duration(n) * sampleEvery)
		s.Routes = append(s.Routes, s.Routes[0], &proto.RouteStatus{Direction: proto.Direction_DIRECTION_STORE, Bytes: 5})
		h.add(s)
	}
	answer := httptest.NewRecorder()
	h.ServeHTTP(answer, nil)
	var got []struct {
		Uptime   float64
		Version  string
		Counters map[string]uint64
		Routes   []struct {
			Direction string
			Bytes     uint64
		}
		Policies []struct {
			Name  string
			Trial struct{ Hits uint64 }
		}
		Latencies []struct{ Buckets []uint64 }
	}
	testenv.OK(t, json.Unmarshal(answer.Body.Bytes(), &got))
	if len(got) != samplesKept || got[0].Uptime != 7*sampleEvery.Seconds() {
		t.Fatalf("got %d readings from %v s on, want %d from 14 s on", len(got), got[0].Uptime, samplesKept)
	}
	last, n := got[samplesKept-1], uint64(samplesKept+6)
	if last.Version != "" || len(last.Counters) != 3 || last.Counters["lookup_hits"] != 75*n {
		t.Errorf("the last reading is %+v, want three counters and no version", last)
	}
	if len(last.Routes) != 2 || last.Routes[0].Bytes != 2*n<<30 || last.Routes[1].Bytes != 5 || last.Routes[1].Direction != "store" {
		t.Errorf("routes of the last reading: %+v, want one sum for each direction", last.Routes)
	}
	if len(last.Policies) != 1 || last.Policies[0].Name != "next" || last.Policies[0].Trial.Hits != 60*n || len(last.Latencies) != 1 {
		t.Errorf("the last reading is %+v, want the shadow and one latency", last)
	}
}
