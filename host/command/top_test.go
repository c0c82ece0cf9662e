package command

import (
	"fmt"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/kvhost/kvhost/abi/testenv"
)

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

// kvhost top draws again and again what fits the terminal, and leaves the terminal as it was.
func TestTop(t *testing.T) {
	dir := shortDir(t)
	startHost(t, dir, "--policy", "lru.wasm", "--http-listen", "")
	if r := finish(t, command(t, dir, "top")); r.code != exitUsage || !strings.Contains(r.stderr, "kvhost status") {
		t.Errorf("kvhost top without a terminal: want exit code %d and the way to kvhost status, got %d and %q", exitUsage, r.code, r.stderr)
	}
	cmd := command(t, dir, "top", "--every", "100ms")
	m := onTerminal(t, cmd)
	const home = "\x1b[H"
	m.await(t, "three frames", func(text string) bool { return strings.Count(text, home) > 3 })
	if _, err := m.screen.WriteString("\x03"); err != nil { // Ctrl-C
		t.Fatal(err)
	}
	<-m.ended
	if err := cmd.Wait(); err != nil {
		t.Errorf("kvhost top, ended by Ctrl-C: want success, got %v", err)
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
