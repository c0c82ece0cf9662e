// Package observe is the read-only HTTP interface of a host, for Prometheus, for probes, and for people. It cannot change the
// host and counts nothing itself: a collector reads the statistics of the store, the transfer engine and the server at each
// scrape.
//
//	GET /          the page
//	GET /manual/   the manual, if the program was installed with it
//	GET /livez     200 while the process answers
//	GET /readyz    200 when the host is ready, otherwise 503 with one reason in each line
//	GET /metrics   for Prometheus
//	GET /status    proto.StatusResponse as JSON
//	GET /tables    the tables of the page and of kvhost status
//	GET /history   an array of readings for the page's graphs, one for every two seconds of the last five minutes
//	GET /debug/pprof/...  profiles of the process, if enabled
//
// If a token is configured, all paths except the probes, the page and the manual require "Authorization: Bearer ...". Otherwise they
// require a Host header with an address or a name of this host.
package observe

import (
	"bytes"
	"cmp"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"net/http/pprof"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/kvhost/kvhost/host/internal/budget"
	"github.com/kvhost/kvhost/host/internal/proto"
	"github.com/kvhost/kvhost/host/internal/regular"
)

type Config struct {
	Listen    string // host:port
	CertFile  string // PEM file; empty means no TLS
	KeyFile   string
	TokenFile string // file with the token that clients must present; empty means none
	Profiles  bool   // serve /debug/pprof/

	Registry    *prometheus.Registry
	Status      func() *proto.StatusResponse // returns the status including NotReady
	Connections *budget.Connections          // limit of open connections
	Log         *slog.Logger

	period, timeout, sampleEvery time.Duration // replace the constants in tests
	manuals                      []string      // directories of the manual, in tests
}

type Server struct {
	listener net.Listener
	server   http.Server
	sample   func(context.Context) // maintains the history until the context is done
}

// Listen reads the credentials and binds the address. Nothing is served before [Server.Serve].
func Listen(cfg Config) (*Server, error) {
	guard, err := newGuard(cfg.TokenFile, cfg.Listen, cfg.Log)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrCredential, err)
	}
	var certificate *regular.Renewed[*tls.Certificate] // nil means no TLS
	if cfg.CertFile != "" {
		load := func() (*tls.Certificate, error) {
			pair, err := tls.LoadX509KeyPair(cfg.CertFile, cfg.KeyFile)
			if err != nil {
				return nil, fmt.Errorf("http.tls_cert, http.tls_key: %w", err)
			}
			return &pair, nil
		}
		if certificate, err = regular.Renew(load, cfg.Log, cfg.CertFile, cfg.KeyFile); err != nil {
			return nil, fmt.Errorf("%w: %w", ErrCredential, err)
		}
	}
	bound, err := net.Listen("tcp", cfg.Listen)
	if err != nil {
		return nil, fmt.Errorf("%w: %s: %w%s; another address is --http-listen", ErrHTTP, cfg.Listen, err, Holder(cfg.Listen, err))
	}
	if ip := bound.Addr().(*net.TCPAddr).IP; !ip.IsLoopback() && (cfg.TokenFile == "" || cfg.CertFile == "") {
		cfg.Log.Warn("the HTTP address is not on loopback, and clients need no token or can be listened to: "+
			"set http.token_file, http.tls_cert and http.tls_key, or keep strangers off the network",
			"address", bound.Addr().String(), "token", cfg.TokenFile != "", "tls", cfg.CertFile != "")
	}
	handler, sample := handler(cfg, guard)
	s := &Server{sample: sample, listener: listener{bound, cfg.Connections}, server: http.Server{
		Handler: handler, ReadHeaderTimeout: 5 * time.Second, ReadTimeout: readTimeout, WriteTimeout: cmp.Or(cfg.timeout, writeTimeout),
		IdleTimeout: time.Minute, MaxHeaderBytes: 16 << 10, ErrorLog: slog.NewLogLogger(cfg.Log.Handler(), slog.LevelDebug),
	}}
	if certificate != nil {
		s.listener = tls.NewListener(s.listener, &tls.Config{
			GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return certificate.Now(), nil },
			MinVersion:     tls.VersionTLS12,
			NextProtos:     []string{"http/1.1"}, // a connection of HTTP/2 would count as one but carry many requests
		})
	}
	return s, nil
}

// answer is a status and its encoding.
type answer struct {
	status *proto.StatusResponse
	body   []byte
}

// exposition is an answer of /metrics, which is written once for several clients.
type exposition struct {
	bytes.Buffer
	header http.Header
	code   int
}

func (e *exposition) Header() http.Header  { return e.header }
func (e *exposition) WriteHeader(code int) { e.code = code }

// handler returns the handler of requests. sample maintains the history.
func handler(cfg Config, guard *guard) (_ http.Handler, sample func(context.Context)) {
	period := cmp.Or(cfg.period, period)
	status := shared(period, func() (answer, error) {
		s := cfg.Status()
		body, err := proto.JSON(s)
		return answer{s, append(body, '\n')}, err
	})
	exposed := promhttp.HandlerFor(cfg.Registry, promhttp.HandlerOpts{
		ErrorHandling: promhttp.ContinueOnError, ErrorLog: slog.NewLogLogger(cfg.Log.Handler(), slog.LevelWarn),
		DisableCompression: true, // compression would take more memory than the rest of an answer
	})
	metrics := shared(period, func() (*exposition, error) {
		e := &exposition{header: http.Header{}, code: http.StatusOK}
		exposed.ServeHTTP(e, &http.Request{})
		return e, nil
	})
	mux, guarded := http.NewServeMux(), http.NewServeMux()
	mux.HandleFunc("GET /livez", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "ok") })
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, _ *http.Request) {
		if a, _ := status(); len(a.status.GetNotReady()) > 0 {
			why := a.status.GetNotReady()
			http.Error(w, strings.Join(why, "\n"), http.StatusServiceUnavailable)
			return
		}
		fmt.Fprintln(w, "ok")
	})
	guarded.HandleFunc("GET /metrics", func(w http.ResponseWriter, _ *http.Request) {
		e, _ := metrics()
		maps.Copy(w.Header(), e.header)
		w.WriteHeader(e.code)
		w.Write(e.Bytes())
	})
	guarded.HandleFunc("GET /status", func(w http.ResponseWriter, _ *http.Request) {
		a, err := status()
		if err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
		w.Header().Set("Content-Type", "application/json")
		w.Write(a.body)
	})
	past := &history{}
	guarded.Handle("GET /history", past)
	guarded.HandleFunc("GET /tables", func(w http.ResponseWriter, _ *http.Request) {
		a, _ := status()
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(Tables(past.earlier(a.status), a.status)) // an error means that the client is gone
	})
	if cfg.Profiles {
		guarded.HandleFunc("GET /debug/pprof/", pprof.Index)
		guarded.HandleFunc("GET /debug/pprof/cmdline", pprof.Cmdline)
		guarded.HandleFunc("GET /debug/pprof/profile", pprof.Profile)
		guarded.HandleFunc("GET /debug/pprof/symbol", pprof.Symbol)
		guarded.HandleFunc("GET /debug/pprof/trace", pprof.Trace)
	}
	mux.Handle("/", guard.protect(guarded))
	if cfg.manuals == nil {
		cfg.manuals = manuals()
	}
	servePage(mux, cfg.manuals) // without a guard: the page has no figures, and requests them with the token
	return mux, func(ctx context.Context) { past.run(ctx, cmp.Or(cfg.sampleEvery, sampleEvery), status) }
}

// Addr returns the address on which the server listens.
func (s *Server) Addr() string { return s.listener.Addr().String() }

// Serve serves until the context is done.
func (s *Server) Serve(ctx context.Context) error {
	stop := context.AfterFunc(ctx, func() { s.server.Close() })
	defer stop()
	sampling, end := context.WithCancel(ctx)
	over := make(chan struct{})
	go func() { s.sample(sampling); close(over) }()
	defer func() { end(); <-over }()
	if err := s.server.Serve(s.listener); err != nil && !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("%w: %s: %w", ErrHTTP, s.Addr(), err)
	}
	return nil
}

// Close ends Serve and every connection.
func (s *Server) Close() error {
	err := s.server.Close()
	if cerr := s.listener.Close(); cerr != nil && !errors.Is(cerr, net.ErrClosed) {
		err = errors.Join(err, cerr)
	}
	return err
}
