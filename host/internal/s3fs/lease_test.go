package s3fs

import (
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/kvhost/kvhost/host/internal/testkit/s3double"
	"github.com/kvhost/kvhost/staging"
)

// procWithout is a /proc that hides processes, as hidepid=2 does, or all that is not about a process, as subset=pid does.
func procWithout(t *testing.T, processes, rest bool) string {
	t.Helper()
	dir := t.TempDir()
	link := func(name string) {
		must(t, os.MkdirAll(filepath.Join(dir, filepath.Dir(name)), 0o700))
		must(t, os.Symlink("/proc/"+name, filepath.Join(dir, name)))
	}
	must(t, os.MkdirAll(filepath.Join(dir, "self", "ns"), 0o700))
	space, err := os.Readlink("/proc/self/ns/pid")
	must(t, err)
	must(t, os.Symlink(space, filepath.Join(dir, "self", "ns", "pid")))
	if !processes {
		entries, err := filepath.Glob("/proc/[0-9]*/stat")
		must(t, err)
		for _, e := range entries {
			link(e[len("/proc/"):])
		}
	}
	if !rest {
		link("sys/kernel/random/boot_id")
	}
	return dir
}

// TestLockOfAHostThatIsNotSeen: a lock is not taken from a host that is alive, whatever of the processes may be seen.
func TestLockOfAHostThatIsNotSeen(t *testing.T) {
	name := top + "/.kvhost/lock"
	for what, hide := range map[string]struct{ processes, rest, both bool }{
		"processes of others are hidden":          {processes: true},
		"there is nothing but processes":          {rest: true, both: true},
		"there is nothing":                        {processes: true, rest: true},
		"there is nothing at either of the hosts": {processes: true, rest: true, both: true},
	} {
		t.Run(what, func(t *testing.T) {
			s := s3double.Start(t)
			a, b := open(t, s.URL), open(t, s.URL)
			b.proc = procWithout(t, hide.processes, hide.rest)
			if hide.both {
				a.proc = b.proc
			}
			held, err := a.Lock(name)
			must(t, err)
			if _, err := b.Lock(name); !errors.Is(err, staging.ErrLocked) {
				t.Errorf("the second host's lock: got %v, want %v", err, staging.ErrLocked)
			}
			must(t, held.Close())
		})
	}
}

// TestLockOfAProcessThatHasEnded: only of a process that was seen to have ended is a lock not waited for.
func TestLockOfAProcessThatHasEnded(t *testing.T) {
	s := s3double.Start(t)
	name, key := top+"/.kvhost/lock", "some/prefix/.kvhost/lock"
	ended := exec.Command("true")
	must(t, ended.Run())
	other := open(t, s.URL).me()
	other.PID, other.Term = ended.Process.Pid, time.Hour
	other.Started = "1"
	text, err := json.Marshal(&other)
	must(t, err)
	s.Set(key, text)
	f := open(t, s.URL)
	f.proc = procWithout(t, true, false)
	held, err := f.Lock(name)
	must(t, err)
	must(t, held.Close())
	if left := s.Objects(); len(left) != 0 {
		t.Errorf("after the lock was given back: got %d objects, want none", len(left))
	}
}

// TestProcessOfAnotherMachine: without the kernel's boot id all machines write the same of theirs.
func TestProcessOfAnotherMachine(t *testing.T) {
	f := open(t, s3double.Start(t).URL)
	f.proc = procWithout(t, false, true)
	me := f.me()
	other := me
	other.Started = "1"
	if f.hasEnded(&other, &me) || me.Kernel != "" {
		t.Errorf("a process of kernel %q has ended, as this one of %q sees it; want that it is not known", other.Kernel, me.Kernel)
	}
}

// TestNonsenseInALock: a lock that says what none says is waited for as long as this host's own would last.
func TestNonsenseInALock(t *testing.T) {
	for _, text := range []string{"", "nonsense", `{"holder":"x","term_ns":9223372036854775807}`, `{"holder":"x","term_ns":-1}`, `{"term_ns":"long"}`, `[]`} {
		s := s3double.Start(t)
		s.Set("some/prefix/.kvhost/lock", []byte(text))
		f := open(t, s.URL)
		held, err := f.Lock(top + "/.kvhost/lock")
		must(t, err)
		must(t, held.Close())
	}
}
