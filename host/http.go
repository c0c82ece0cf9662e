package host

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
)

// httpListener serves /healthz and /metrics, read-only and on loopback only.
type httpListener struct {
	listener net.Listener
	server   http.Server
}

func listenHTTP(addr string, registry *prometheus.Registry, ready <-chan struct{}) (*httpListener, error) {
	l, err := net.Listen("tcp", addr)
	if err != nil {
		return nil, fmt.Errorf("%w: %s: %w", ErrHTTP, addr, err)
	}
	if ip := l.Addr().(*net.TCPAddr).IP; !ip.IsLoopback() {
		return nil, errors.Join(fmt.Errorf("%w: %s is not a loopback address", ErrHTTP, addr), l.Close())
	}
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(registry, promhttp.HandlerOpts{}))
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) {
		select {
		case <-ready:
			fmt.Fprintln(w, "ok")
		default:
			http.Error(w, "starting", http.StatusServiceUnavailable)
		}
	})
	return &httpListener{listener: l, server: http.Server{Handler: mux, ReadHeaderTimeout: 5 * time.Second}}, nil
}

func (l *httpListener) addr() string { return l.listener.Addr().String() }

// serve serves until the context is done.
func (l *httpListener) serve(ctx context.Context) error {
	stop := context.AfterFunc(ctx, func() { l.server.Close() })
	defer stop()
	if err := l.server.Serve(l.listener); err != nil && !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("%w: %s: %w", ErrHTTP, l.addr(), err)
	}
	return nil
}

func (l *httpListener) close() error {
	err := l.server.Close()
	if cerr := l.listener.Close(); cerr != nil && !errors.Is(cerr, net.ErrClosed) {
		err = errors.Join(err, cerr)
	}
	return err
}
