package command

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
	"unicode"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/internal/proto"
	"github.com/lmittmann/tint"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"
)

func TestScreen(t *testing.T) {
	roots := func(used uint64) []*proto.RootStatus {
		return []*proto.RootStatus{{Path: "/a", Used: used, Capacity: 4 << 30, State: proto.RootState_ROOT_STATE_READ_ONLY, Scanning: true, Reason: "it is so"}}
	}
	route := func(bytes uint64) []*proto.RouteStatus {
		return []*proto.RouteStatus{{Gpu: "host", Root: "/a", Route: proto.Route_ROUTE_STAGED, Direction: proto.Direction_DIRECTION_LOAD, Bytes: bytes, Files: 1}}
	}
	before := &proto.StatusResponse{Uptime: durationpb.New(10 * time.Second), Counters: map[string]uint64{"lookup_keys": 100, "lookup_hits": 100, "lookups": 10}, Routes: route(0)}
	now := &proto.StatusResponse{
		Version: "v1", Uptime: durationpb.New(12 * time.Second), Roots: roots(1 << 30), Routes: route(3e9), NotReady: []string{"because"},
		Counters: map[string]uint64{"lookup_keys": 200, "lookup_hits": 125, "lookups": 30, "level0_hits": 7, "level0_volatile": 50, "level0_kept": 35, "level2_hits": 5,
			"level2_loaded_bytes": 1 << 30, "level2_demotion": 11, "level2_demotion_shed": 1, "level2_promotion_shed": 2},
		Latencies: []*proto.LatencyStatus{{Answer: proto.Answer_ANSWER_LOAD, Count: 4, Sum: durationpb.New(20 * time.Millisecond),
			Bounds: []*durationpb.Duration{{Nanos: 1e6}, {Nanos: 10e6}}, Buckets: []uint64{1, 3, 0}}},
	}
	for range mostListed + 2 {
		now.SessionList = append(now.SessionList, &proto.SessionStatus{Engine: "e", Since: timestamppb.Now()})
	}
	text := drawScreen(before, now)
	for _, want := range []string{"up 12s  NOT READY", "  because", "hit ratio 62.5% (now 25.0%)  lookups 10/s  loads 1.4 GiB/s",
		"read only, scanning  [###.......]  1 GiB  4 GiB", "/a is read only: it is so", "<10ms  <10ms  <10ms  5ms", "... and 2 more",
		"70.0%  0\n", "2      5     1 GiB   11          0            0           0     -      3"} {
		if !strings.Contains(text, want) {
			t.Errorf("no %q in\n%s", want, text)
		}
	}
	if text := drawScreen(now, before); !strings.Contains(text, "loads 0 B/s") { // the host was restarted
		t.Errorf("a restarted host:\n%s", text)
	}
}

// What is bad is red on a terminal, unless NO_COLOR is set.
// TestNamesOfOthersAreSeen: the names of engines, models and roots, and what peers say, neither command a terminal nor make lines of their own.
func TestNamesOfOthersAreSeen(t *testing.T) {
	const evil = "\x1b[31mPWN\x07\x1b]0;title\x07\nRUN  rm\t-rf\u202e\u009b2J"
	now := &proto.StatusResponse{Version: evil, NotReady: []string{evil}, Uptime: durationpb.New(time.Second),
		Roots:       []*proto.RootStatus{{Path: evil, Reason: evil, State: proto.RootState_ROOT_STATE_OUT}},
		Peers:       []*proto.PeerStatus{{Name: evil, Address: evil, State: evil, Reason: evil}},
		Usage:       []*proto.UsageStatus{{Model: evil}},
		SessionList: []*proto.SessionStatus{{Engine: evil, Role: evil, Model: evil, Since: timestamppb.Now()}},
	}
	text := drawScreen(now, now)
	for _, r := range text {
		if r != '\n' && r != '\t' && !unicode.IsPrint(r) {
			t.Fatalf("%U is shown in %q", r, text)
		}
	}
	if strings.Contains(text, "\nRUN") || !strings.Contains(text, `\u001b[31mPWN\u0007`) {
		t.Errorf("the screen is %q, want each name on one line, with what is not seen as numbers", text)
	}
	var log strings.Builder
	for _, h := range []slog.Handler{slog.NewJSONHandler(&log, &slog.HandlerOptions{ReplaceAttr: asText}), tint.NewTextHandler(&log, &tint.Options{ReplaceAttr: asText, NoColor: true})} {
		slog.New(h).Warn("a peer has gone", "peer", evil, "error", errors.New(evil))
	}
	for _, r := range log.String() {
		if r != '\n' && !unicode.IsPrint(r) {
			t.Errorf("%U is in the log %q", r, log.String())
		}
	}
	if n := strings.Count(log.String(), "\n"); n != 2 {
		t.Errorf("two lines of the log have become %d: %q", n, log.String())
	}
}

func TestBadLinesAreRed(t *testing.T) {
	t.Setenv("TERM", "xterm")
	t.Setenv("NO_COLOR", "")
	for line, red := range map[string]bool{
		"kvhost v1  up 12s  NOT READY": true, "/a  full         [###.......]  1 GiB": true, "/b  out, scanning  [": true,
		"main  evict  quarantine  x.wasm": true, "/a  in service  [###.......]": false, "/full  in service  [": false, "kvhost v1  up 12s  ready": false,
	} {
		if got := paint(line); (got != line) != red || red && got != "\x1b[31m"+line+"\x1b[39m" {
			t.Errorf("%q is painted %q, want red: %v", line, got, red)
		}
	}
	t.Setenv("NO_COLOR", "1")
	if got := paint("NOT READY"); got != "NOT READY" {
		t.Errorf("with NO_COLOR: %q, want no colour", got)
	}
}

// A frame fits the terminal, and says when the host gives no answer.
func TestFrame(t *testing.T) {
	screen := &watchScreen{size: func() (int, int) { return 12, 10 }}
	status := &proto.StatusResponse{Version: "v1", Uptime: durationpb.New(5 * time.Second), NotReady: strings.Fields(strings.Repeat("why ", 50))}
	for _, c := range []struct {
		name    string
		status  *proto.StatusResponse
		failure error
		lines   int
		want    []string
	}{
		{"long", status, nil, 10, []string{"kvhost v1  u" + restOfLine, "44 more line" + restOfLine}},
		{"no answer", status, errors.New("gone"), 10, []string{"kvhost v1  u", "no answer: g"}},
		{"no answer yet", nil, errors.New("host: gone\nlong ago"), 1, []string{"no answer: g"}},
	} {
		frame := screen.frame(c.status, c.status, c.failure)
		if got := strings.Count(frame, "\n") + 1; got != c.lines || !strings.HasPrefix(frame, home) || !strings.HasSuffix(frame, restOfScreen) {
			t.Errorf("%s: want %d lines from the top of a screen whose rest is erased, got %d: %q", c.name, c.lines, got, frame)
		}
		for _, want := range c.want {
			if !strings.Contains(frame, want) {
				t.Errorf("%s: want %q in the frame, got %q", c.name, want, frame)
			}
		}
	}
}

// terminal is a pseudo-terminal on which a command runs, and what the command has drawn there.
type terminal struct {
	screen *os.File

	mu    sync.Mutex
	drawn []byte
	more  chan struct{} // receives after each read
	ended chan struct{} // is closed when the last process has closed the terminal
}

// onTerminal starts a command in a session of its own whose terminal has 60 columns and 20 lines.
func onTerminal(t *testing.T, cmd *exec.Cmd) *terminal {
	t.Helper()
	screen, err := os.OpenFile("/dev/ptmx", os.O_RDWR|syscall.O_NOCTTY, 0)
	if err != nil {
		t.Fatalf("open a pseudo-terminal: %v", err)
	}
	fd := int(screen.Fd())
	n, err := unix.IoctlGetInt(fd, unix.TIOCGPTN)
	if err == nil {
		err = unix.IoctlSetPointerInt(fd, unix.TIOCSPTLCK, 0)
	}
	if err == nil {
		err = unix.IoctlSetWinsize(fd, unix.TIOCSWINSZ, &unix.Winsize{Row: 20, Col: 60})
	}
	if err != nil {
		t.Fatalf("set up a pseudo-terminal: %v", err)
	}
	tty, err := os.OpenFile(fmt.Sprintf("/dev/pts/%d", n), os.O_RDWR|syscall.O_NOCTTY, 0)
	if err != nil {
		t.Fatalf("open a pseudo-terminal: %v", err)
	}
	cmd.Stdin, cmd.Stdout, cmd.Stderr = tty, tty, tty
	cmd.Env = append(cmd.Env, "TERM=xterm-256color")
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
	testenv.OK(t, cmd.Start())
	tty.Close()
	m := &terminal{screen: screen, more: make(chan struct{}, 1), ended: make(chan struct{})}
	go m.read()
	t.Cleanup(func() { cmd.Process.Kill(); <-m.ended; screen.Close() })
	return m
}

func (m *terminal) read() {
	defer close(m.ended)
	b := make([]byte, 4<<10)
	for {
		n, err := m.screen.Read(b) // EIO when nothing holds the terminal any more
		if err != nil {
			return
		}
		m.mu.Lock()
		m.drawn = append(m.drawn, b[:n]...)
		m.mu.Unlock()
		select {
		case m.more <- struct{}{}:
		default:
		}
	}
}

func (m *terminal) text() string {
	m.mu.Lock()
	defer m.mu.Unlock()
	return string(m.drawn)
}

// await waits until enough is drawn.
func (m *terminal) await(t *testing.T, want string, enough func(string) bool) {
	t.Helper()
	for !enough(m.text()) {
		select {
		case <-m.more:
		case <-m.ended:
			t.Fatalf("want %s, and the command ended with %q", want, m.text())
		}
	}
}

// A command that draws nothing writes its lines to the terminal and no escape sequence: a query that a terminal does not
// answer would hold up each command.
func TestCommandsAskTheTerminalNothing(t *testing.T) {
	cmd := command(t, shortDir(t), "version")
	m := onTerminal(t, cmd)
	<-m.ended
	if err := cmd.Wait(); err != nil {
		t.Errorf("kvhost version on a terminal: want success, got %v", err)
	}
	if text := m.text(); !strings.HasPrefix(text, "kvhost ") || strings.Contains(text, "\x1b") {
		t.Errorf("kvhost version on a terminal: want its lines alone, got %q", text)
	}
}

// kvhost status --watch draws again and again what fits the terminal, and leaves the terminal as it was.
func TestWatch(t *testing.T) {
	dir := shortDir(t)
	startHost(t, dir, "--policy", "lru.wasm", "--http-listen", "")
	if r := finish(t, command(t, dir, "status", "--watch")); r.code != exitUsage || !strings.Contains(r.stderr, "--json") {
		t.Errorf("kvhost status --watch without a terminal: want exit code %d and the way to --json, got %d and %q", exitUsage, r.code, r.stderr)
	}
	cmd := command(t, dir, "status", "--watch=100ms")
	m := onTerminal(t, cmd)
	const home = "\x1b[H"
	m.await(t, "three frames", func(text string) bool { return strings.Count(text, home) > 3 })
	if _, err := m.screen.WriteString("\x03"); err != nil { // Ctrl-C
		t.Fatal(err)
	}
	<-m.ended
	if err := cmd.Wait(); err != nil {
		t.Errorf("kvhost status --watch, ended by Ctrl-C: want success, got %v", err)
	}
	text := m.text()
	begins, ends := "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
	if !strings.Contains(text, begins) || !strings.HasSuffix(text, ends) {
		t.Errorf("want the second screen entered with %q and left with %q, got %q", begins, ends, text)
	}
	frame := strings.Split(text, home)[2]
	lines := strings.Split(frame, "\r\n")
	if len(lines) < 5 || len(lines) > 20 || !strings.Contains(frame, "hit ratio -") {
		t.Errorf("a frame: want the status in at most 20 lines, got %d lines: %q", len(lines), frame)
	}
	for _, l := range lines {
		if plain := strings.NewReplacer("\x1b[K", "", "\x1b[J", "").Replace(l); len([]rune(plain)) > 60 {
			t.Errorf("a frame: want lines of at most 60 columns, got %q", plain)
		}
	}
}

func TestProgress(t *testing.T) {
	var out strings.Builder
	now := time.Unix(1000, 0)
	p := &progress{out: &out, unit: "files", width: 60, now: func() time.Time { return now }}
	expect := func(what, want string) {
		t.Helper()
		if got := strings.TrimSpace(strings.TrimPrefix(out.String(), "\r")); got != want {
			t.Errorf("line of progress %s: got %q, want %q", what, got, want)
		}
		out.Reset()
	}
	p.Begin(200)
	now = now.Add(10 * time.Second)
	p.Step(50, "1.25 GB")
	expect("a quarter in 10 s", "50/200 files [=====---------------] 1.25 GB, 30s left")
	now = now.Add(redraw / 2)
	p.Step(50, "2.50 GB")
	expect("again too soon", "")
	now = now.Add(redraw)
	p.Step(100, "")
	expect("all", "200/200 files [====================] 2.50 GB")
	p.Step(0, strings.Repeat("x", 200))
	now = now.Add(redraw)
	p.Step(10, "")
	if line := strings.TrimPrefix(out.String(), "\r"); len(line) != p.width-1 {
		t.Errorf("a line of %d columns on a terminal of %d", len(line), p.width)
	}
	out.Reset()
	p.End()
	expect("the end", "")
}

// What is printed has no names of packages, and what only looks like one stays.
func TestPlain(t *testing.T) {
	for text, want := range map[string]string{
		"host: policy refused: x: policy: not found: x": "policy refused: x: not found: x",
		"store: root is in use: /kv: staging: locked":   "root is in use: /kv: locked",
		"bench: server: x":                       "x",
		"/srv/store: is a file":                  "/srv/store: is a file",
		"f.toml:3: config: bad value: log.level": "f.toml:3: bad value: log.level",
	} {
		if got := plainError(errors.New(text)); got != want {
			t.Errorf("%q is printed as %q, want %q", text, got, want)
		}
	}
}
