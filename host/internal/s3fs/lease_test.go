package s3fs

import (
	"bytes"
	"encoding/json"
	"errors"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
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
			a.cfg.Term = patient
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

// TestLateAnswer: a read that gets no answer is asked for again once that is late, and the second answer is the object. Without a
// budget it waits for the first.
func TestLateAnswer(t *testing.T) {
	s := s3double.Start(t)
	p := s3double.StartProxy(t, s.URL)
	f := open(t, p.URL)
	data := bytes.Repeat([]byte("late"), 10_000)
	s.Set("some/prefix/object", data)
	load := func() {
		t.Helper()
		r, err := f.OpenFile(top+"/object", os.O_RDONLY, 0)
		if err != nil {
			t.Fatal(err)
		}
		defer r.Close()
		got := make([]byte, len(data))
		if _, err := r.ReadAt(got, 0); err != nil || !bytes.Equal(got, data) {
			t.Errorf("error %v, the right bytes: %t", err, bytes.Equal(got, data))
		}
	}
	load()
	for _, c := range []struct {
		left   float64
		fault  s3double.Fault
		failed uint64
	}{{1, s3double.Stall, 0}, {1, s3double.Late, 0}, {0, s3double.Late, 0}} {
		f.hedge.late, f.hedge.left = 20*time.Millisecond, c.left
		before, asked := f.Stats(), s.Count("GET")
		p.Set(s3double.Rule{Fault: c.fault, Method: "GET", Times: 1})
		load()
		now := f.Stats()
		if failed := now.Failed[Get] - before.Failed[Get]; failed != c.failed {
			t.Errorf("%s, %g to ask again: %d reads failed, want %d", c.fault, c.left, failed, c.failed)
		}
		if extra := now.Requests[Get] - before.Requests[Get] - 1; c.left == 0 && extra != 0 || c.left > 0 && extra < 1 {
			t.Errorf("%s, %g to ask again: %d reads more than without a fault", c.fault, c.left, extra)
		}
		if s.Count("GET") == asked {
			t.Error("the server was not asked")
		}
	}
}

// TestWhenAnAnswerIsLate: about one in twenty is, and no more are asked for again.
func TestWhenAnAnswerIsLate(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	var h hedge
	var all []time.Duration
	again := 0
	for range 20_000 {
		d := time.Duration(random.ExpFloat64() * float64(10*time.Millisecond))
		if late := h.after(); late > 0 && d > late && h.spend() {
			again++
		}
		h.took(d)
		all = append(all, d)
	}
	slices.Sort(all)
	if late := h.after(); late < all[len(all)*85/100] || late > all[len(all)*99/100] {
		t.Errorf("late is %s, of answers that take %s at the 85th and %s at the 99th percentile", late, all[len(all)*85/100], all[len(all)*99/100])
	}
	if again < len(all)/40 || again > len(all)/20 {
		t.Errorf("%d of %d are asked for again, want 2.5 to 5 %%", again, len(all))
	}
}
