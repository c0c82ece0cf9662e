//go:build linux

package testenv

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// Building is what the line begins with that says that a tool is built.
const Building = "testenv: building "

// Obtain says whether the machine has it, and builds it before where that can be done. Tests of other processes wait for one build.
func (t *Tool) Obtain() bool {
	t.building.Do(func() {
		if t.build == nil || Root() == "" || t.After != nil && !t.After.Obtain() {
			return
		}
		if _, err := exec.LookPath(t.build[0]); err != nil || t.build[0] != "make" && t.probe() {
			return
		}
		if err := t.make(); err != nil {
			t.failed = fmt.Sprintf(" (%s failed: %v)", strings.Join(t.build, " "), err)
		}
	})
	return t.Have()
}

// make runs the command in the checkout.
func (t *Tool) make() error {
	dir := filepath.Join(Root(), ".build")
	if err := os.MkdirAll(dir, 0o777); err != nil {
		return err
	}
	lock, err := os.OpenFile(filepath.Join(dir, "tools.lock"), os.O_CREATE|os.O_RDWR, 0o666)
	if err != nil {
		return err
	}
	defer lock.Close() // and with it the lock ends
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX); err != nil {
		return err
	}
	if !t.probe() {
		fmt.Fprintf(os.Stderr, "%s%s, for tests of %s: it is downloaded and takes minutes, once\n", Building, t.Name, t.Tests)
	}
	cmd := exec.Command(t.build[0], t.build[1:]...)
	cmd.Dir = Root()
	cmd.Env = append(os.Environ(), "MAKEFLAGS=", "MAKELEVEL=", "GOFLAGS=", "CGO_ENABLED=0")
	out, err := cmd.CombinedOutput()
	if lines := strings.Split(strings.TrimSpace(string(out)), "\n"); err != nil {
		return fmt.Errorf("%w: %s", err, lines[max(0, len(lines)-1)])
	}
	return nil
}
