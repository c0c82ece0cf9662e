package fusefs

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"strings"
	"sync"

	"golang.org/x/sys/unix"
)

// Mount is a mounted file system.
type Mount struct {
	Dir    string // where it is mounted
	cmd    *exec.Cmd
	stdin  io.WriteCloser
	stdout *bufio.Reader
	words  strings.Builder // of standard error
	mu     sync.Mutex
}

// New mounts under at dir. Both are directories that exist.
func New(under, dir string) (*Mount, error) {
	m := &Mount{Dir: dir, cmd: exec.Command("/proc/self/exe")}
	m.cmd.Args = []string{processName, under, dir}
	m.cmd.Stderr = &m.words
	// A signal from a terminal ends the tests, which unmount then.
	m.cmd.SysProcAttr = &unix.SysProcAttr{Setpgid: true}
	out, err := m.cmd.StdoutPipe()
	if err == nil {
		m.stdin, err = m.cmd.StdinPipe()
	}
	if err == nil {
		err = m.cmd.Start()
	}
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrServer, err)
	}
	m.stdout = bufio.NewReader(out)
	if _, err := m.answer(); err != nil {
		return nil, errors.Join(err, m.Unmount())
	}
	return m, nil
}

// Set replaces the rules, in the text form of faultfs, one per line. It releases what hangs.
func (m *Mount) Set(rules string) error {
	_, err := m.ask("set " + strings.ReplaceAll(strings.TrimSpace(rules), "\n", "\x00"))
	return err
}

// Injected is the number of faults since the rules were set.
func (m *Mount) Injected() (n uint64, err error) {
	text, err := m.ask("injected")
	if err == nil {
		_, err = fmt.Sscan(text, &n)
	}
	return n, err
}

// Kill ends the server as a crash would. Every operation on the mount fails from then on.
func (m *Mount) Kill() error { return m.cmd.Process.Kill() }

// Unmount releases what hangs, and ends the file system, also if files are still open.
func (m *Mount) Unmount() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	_ = m.stdin.Close() // the server unmounts
	_ = m.cmd.Wait()    // or was killed
	// A server that was killed leaves a mount without a server.
	if err := unix.Unmount(m.Dir, unix.MNT_DETACH); err != nil && !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("fusefs: unmount %s: %w", m.Dir, err)
	}
	return nil
}

func (m *Mount) ask(line string) (string, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if _, err := fmt.Fprintln(m.stdin, line); err != nil {
		return "", fmt.Errorf("%w: %w: %s", ErrServer, err, m.words.String())
	}
	return m.answer()
}

// answer reads one line: "ok" and more, or why not.
func (m *Mount) answer() (string, error) {
	line, err := m.stdout.ReadString('\n')
	if err != nil {
		_ = m.stdin.Close()
		_ = m.cmd.Wait() // its words are complete then
		return "", fmt.Errorf("%w: %w: %s", ErrServer, err, strings.TrimSpace(m.words.String()))
	}
	text, ok := strings.CutPrefix(strings.TrimSpace(line), "ok")
	if !ok {
		return "", fmt.Errorf("%w: %s", ErrServer, line)
	}
	return strings.TrimSpace(text), nil
}
