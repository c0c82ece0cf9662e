package observe

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/internal/budget"
	"github.com/kvhost/kvhost/host/internal/proto"
)

// until waits for what a server reaches by itself.
func until(t *testing.T, what string, cond func() bool) {
	t.Helper()
	testenv.Until(t, what, cond)
}

// Clients that ask and do not read hold a bounded number of connections, for a bounded time, and others get their answers.
func TestSlowReadersAreClosed(t *testing.T) {
	const most, clients = 8, 100
	open := &budget.Connections{Max: most}
	body := strings.Repeat("x", 4<<20) // more than sockets hold
	s := serve(t, Config{
		Connections: open, period: time.Hour, timeout: 200 * time.Millisecond,
		Status: func() *proto.StatusResponse { return &proto.StatusResponse{Version: body} },
	})
	var list []net.Conn
	for range clients {
		c, err := net.Dial("tcp", s.Addr())
		testenv.OK(t, err)
		defer c.Close()
		fmt.Fprintf(c, "GET /status HTTP/1.1\r\nHost: localhost\r\n\r\n")
		list = append(list, c)
	}
	until(t, "the crowd's first connections are closed", func() bool { return open.Figures().Refused >= clients-most })
	if n := open.Figures().Held; n > most {
		t.Errorf("%d connections are open, want %d at most", n, most)
	}
	until(t, "answers that are not read end", func() bool { return open.Figures().Held == 0 })
	for i, c := range list {
		if n, _ := io.Copy(io.Discard, c); n >= int64(len(body)) {
			t.Errorf("connection %d got all %d bytes after the time limit, want less", i, n)
		}
	}
	if code, got, _ := get(t, http.DefaultClient, "http://"+s.Addr()+"/livez", ""); code != 200 || got != "ok\n" {
		t.Errorf("/livez after the crowd: %d %q, want ok", code, got)
	}
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
		{s.Addr(), "", 200}, {"localhost:9476", "", 200}, {"[::1]:9476", "", 200}, {"node-7", "", 200}, {"192.0.2.7:9476", "", 200},
		{s.Addr(), "http://" + s.Addr(), 200},
		{"rebound.example.com:9476", "", 403}, {"rebound.example.com", "", 403}, {"127.0.0.1.example.com:9476", "", 403},
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
