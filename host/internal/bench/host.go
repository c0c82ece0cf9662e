package bench

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvhost/kvhost/host/client"
	"github.com/kvhost/kvhost/host/internal/config"
	"github.com/kvhost/kvhost/host/internal/drive"
	"github.com/kvhost/kvhost/host/internal/proto"
)

// hostProcess is a host in a process of its own, with one root.
type hostProcess struct {
	root    config.Root
	dir     string // directory of its socket and configuration
	socket  string
	process *exec.Cmd
	stop    context.CancelFunc
	ended   chan struct{} // closed when the log of the process ends

	mu    sync.Mutex
	seen  map[string]bool // messages in its log
	http  string          // address of its metrics
	route string          // route of its root
	why   string
	last  []string      // last lines of its log
	more  chan struct{} // holds a token when its log has grown
}

// startHost starts a host with one root. It waits until clients can connect and all memory of the root is available.
func startHost(ctx context.Context, c *config.Config) (_ *hostProcess, err error) {
	dir, err := config.SocketDir("kvhost-bench-")
	if err != nil {
		return nil, err
	}
	h := &hostProcess{root: c.Roots[0], dir: dir, socket: filepath.Join(dir, "s"), ended: make(chan struct{}), seen: map[string]bool{},
		more: make(chan struct{}, 1)}
	defer func() {
		if err != nil {
			err = errors.Join(err, h.close())
		}
	}()
	c.Socket, c.HTTP.Listen = h.socket, "127.0.0.1:0"
	c.Store.Memory = 0 // only the given root is measured
	c.Log.Level, c.Log.Format = config.LevelInfo, config.FormatJSON
	var text bytes.Buffer
	if err := (&config.Loaded{Config: *c}).Print(&text); err != nil {
		return nil, err
	}
	file := filepath.Join(dir, "kvhost.toml")
	if err := os.WriteFile(file, text.Bytes(), 0o600); err != nil {
		return nil, err
	}
	binary, err := os.Executable()
	if err != nil {
		return nil, err
	}
	run, stop := context.WithCancel(context.WithoutCancel(ctx)) // the host must outlive the sessions, even after an interrupt
	h.stop = stop
	h.process = exec.CommandContext(run, binary, "serve", "--config", file)
	h.process.Env = withoutSettings(os.Environ())
	h.process.Cancel = func() error { return h.process.Process.Signal(syscall.SIGTERM) }
	h.process.WaitDelay = 30 * time.Second
	log, err := h.process.StderrPipe()
	if err != nil {
		return nil, err
	}
	if err := h.process.Start(); err != nil {
		h.process = nil
		return nil, err
	}
	go h.read(log)
	if err := h.wait(ctx); err != nil {
		return nil, err
	}
	return h, h.checkRoute()
}

// withoutSettings removes the settings from an environment, so that the configuration file determines all of them.
func withoutSettings(environ []string) []string {
	settings := map[string]bool{config.EnvFile: true, config.EnvName("policy"): true, config.EnvName("root"): true}
	for _, k := range config.Keys() {
		settings[config.EnvName(k.Path())] = true
	}
	return slices.DeleteFunc(environ, func(pair string) bool {
		name, _, _ := strings.Cut(pair, "=")
		return settings[name]
	})
}

// read follows the host's log.
func (h *hostProcess) read(log io.Reader) {
	defer close(h.ended)
	lines := bufio.NewScanner(log)
	for lines.Scan() {
		var line struct{ Msg, Route, Why, HTTP string }
		_ = json.Unmarshal(lines.Bytes(), &line) // other output has no message
		h.mu.Lock()
		h.seen[line.Msg] = true
		switch line.Msg {
		case "route chosen":
			h.route, h.why = line.Route, line.Why
		case "ready":
			h.http = line.HTTP
		}
		h.last = append(h.last[max(0, len(h.last)-19):], lines.Text())
		h.mu.Unlock()
		select {
		case h.more <- struct{}{}:
		default:
		}
	}
}

// wait returns when the host is ready.
func (h *hostProcess) wait(ctx context.Context) error {
	for {
		h.mu.Lock()
		ready := h.seen["ready"] && (!h.root.Kind().TakesMemory() || h.seen["all memory is there"]) &&
			(!h.seen["GPU in use"] || h.seen["all routes are chosen"]) // until then, pieces are staged and probes run
		short := h.seen["memory is smaller than configured"]
		h.mu.Unlock()
		if ready {
			return nil
		}
		if short {
			return fmt.Errorf("%w: too little memory for its root:\n%s", errHost, h.log())
		}
		select {
		case <-h.more:
		case <-h.ended:
			return fmt.Errorf("%w: it has ended:\n%s", errHost, h.log())
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// log returns the end of the host's log.
func (h *hostProcess) log() string {
	h.mu.Lock()
	defer h.mu.Unlock()
	return strings.Join(h.last, "\n")
}

// checkRoute returns an error if the host chose another route than the one to be measured.
func (h *hostProcess) checkRoute() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.root.Route == config.RouteDirect && h.route != config.RouteDirect {
		return fmt.Errorf("%w: it was to take the direct route, and its root is staged: %s", errHost, h.why)
	}
	return nil
}

// routeTaken returns the route of all bytes. For the direct route it relies on cuFile's own statistics. With files and host
// memory there is only one route. It returns an error if pieces were staged although the direct route was chosen, because they
// would spoil the figures.
func (h *hostProcess) routeTaken(ctx context.Context) (string, error) {
	if h.root.Kind().TakesMemory() {
		return "memory", nil
	}
	if h.root.Route != config.RouteDirect {
		return "staged", nil
	}
	q, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+h.http+"/metrics", nil)
	if err != nil {
		return "", err
	}
	r, err := http.DefaultClient.Do(q)
	if err != nil {
		return "", fmt.Errorf("%w: its metrics: %w", errHost, err)
	}
	defer r.Body.Close()
	route := "direct"
	lines := bufio.NewScanner(r.Body)
	for lines.Scan() {
		name, labels, _ := strings.Cut(lines.Text(), "{")
		labels, value, _ := strings.Cut(labels, "} ")
		switch name {
		case "kvhost_route_fallbacks_total", "kvhost_route_full_total":
			if value != "0" {
				return "", fmt.Errorf("%w: %s pieces of the direct route were staged", errChunks, value)
			}
		case "kvhost_route_direct":
			if _, via, ok := strings.Cut(labels, `via="`); ok {
				route = "direct: " + strings.TrimSuffix(via, `"`)
			}
		}
	}
	return route, lines.Err()
}

// used returns the bytes that the host's root takes.
func (h *hostProcess) used(ctx context.Context) (int64, error) {
	st, err := proto.Status(ctx, h.socket)
	if err != nil {
		return 0, fmt.Errorf("%w: its status: %w", errHost, err)
	}
	return int64(st.Roots[0].Used), nil
}

// processor returns the processor time of the host.
func (h *hostProcess) processor() time.Duration {
	const scheduled = 2 // CPUCLOCK_SCHED for a process, given its id
	var t unix.Timespec
	if unix.ClockGettime(int32(^h.process.Process.Pid<<3|scheduled), &t) != nil {
		return 0
	}
	return time.Duration(t.Nano())
}

// hosts starts the hosts of a measurement, one for each setting of store.compression. They run in processes of their own,
// because CUDA does not let a process open the IPC handles of its own memory.
type hosts struct {
	host *config.Config
	root config.Root
	dir  string // for roots that are directories

	mu      sync.Mutex
	running map[string]*hostProcess // by setting
}

// of returns the host with a setting, and starts it if necessary.
func (t *hosts) of(ctx context.Context, compression string) (*hostProcess, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if h := t.running[compression]; h != nil {
		return h, nil
	}
	cfg, root := t.host.Clone(), t.root
	if root.Kind().HasDirectory() {
		root.Path = filepath.Join(t.dir, compression)
	}
	cfg.Store.Compression, cfg.Compressions, cfg.Roots = compression, nil, []config.Root{root}
	h, err := startHost(ctx, cfg)
	if err != nil {
		return nil, err
	}
	if t.running == nil {
		t.running = map[string]*hostProcess{}
	}
	t.running[compression] = h
	return h, nil
}

// open connects to the host with a setting.
func (t *hosts) open(ctx context.Context, compression string, hello client.Hello) (*session, error) {
	h, err := t.of(ctx, compression)
	if err != nil {
		return nil, err
	}
	hello.Socket = h.socket
	c, err := client.Dial(ctx, hello)
	if err != nil {
		return nil, err
	}
	return &session{host: h, rank: drive.Rank{Session: c}}, nil
}

// close ends all hosts.
func (t *hosts) close() error {
	var errs []error
	for _, h := range t.running {
		errs = append(errs, h.close())
	}
	return errors.Join(errs...)
}

// close ends the host and removes its directory.
func (h *hostProcess) close() error {
	var errs []error
	if h.process != nil {
		h.stop()
		<-h.ended
		if err := h.process.Wait(); err != nil && !errors.Is(err, context.Canceled) {
			errs = append(errs, fmt.Errorf("%w: %w:\n%s", errHost, err, h.log()))
		}
	}
	if h.stop != nil {
		h.stop()
	}
	return errors.Join(append(errs, os.RemoveAll(h.dir))...)
}
