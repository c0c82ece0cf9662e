package command

import (
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/client"
	"github.com/kvhost/kvhost/host/internal/store/health"
	"github.com/kvhost/kvhost/host/internal/testkit/fusefs"
	"github.com/kvhost/kvhost/host/internal/testkit/policytest"
	"github.com/kvhost/kvhost/host/kv"
	"golang.org/x/sys/unix"
)

var (
	fuseTime = flag.Duration("fuse.time", 0, "continue with misfortunes in other orders for so long")
	fuseSeed = flag.Uint64("fuse.seed", 0, "their order and their lots; 0 takes a fresh seed")
)

// misfortunes are what happens to a root below the kernel, with a seed each.
var misfortunes = []string{
	"read ** 20%% seed %d: eio",
	"write ** 20%% seed %d: enospc",
	"write,allocate **: enospc",
	"open **.tmp 30%% seed %d: enospc\nmkdir ** 30%% seed %d: enospc", // no inodes
	"write ** 20%% seed %d: edquot\nclose **.tmp 20%% seed %d: edquot",
	"read **.kv 30%% seed %d: torn 4096",
	"write **.tmp 20%% seed %d: torn 4096",
	"publish,link ** 30%% seed %d: eio after",
	"open **_r* 20%% seed %d: estale",
	"remove ** 30%% seed %d: eio after",
	"rename,publish ** 30%% seed %d: eio",
	"close ** 20%% seed %d: eio",
	"any ** 2%% seed %d: eio",
	"any ** 10%% seed %d: delay 50ms",
	"direct **: einval\nwrite ** 50%% seed %d: short\nread ** 33%% seed %d: short",
	"read **: hang",
	"write **: hang",
	"stat,readdir **: hang",
	"any **: hang",
	"any **: enotconn",
}

const fuseCapacity = 96 << 20 // of eleven chunks; fuseChunks are asked for

const fuseChunks = 20

// TestRootOnFUSE gives a real host a root on a file system that fails it below the kernel in every way, while a client
// compares every byte. Nothing wrong is served, the capacity holds, no call of the client waits for a hung disk, and when
// the misfortune is over the root serves again; also after the file system's server was killed and started anew.
func TestRootOnFUSE(t *testing.T) {
	t.Parallel() // it waits more than it works
	testenv.Need(t, testenv.FUSE)
	seed := testenv.Seed(t, "fuse.seed", *fuseSeed)
	rng := rand.New(rand.NewPCG(seed, 3))
	f := &fuseRoot{T: t, rng: rng, under: t.TempDir(), dir: t.TempDir(), tally: testenv.NewTally(t, "fuse")}
	f.mount()
	t.Cleanup(func() {
		testenv.NoError(t, f.m.Unmount())
	})
	dir := shortDir(t)
	root := filepath.Join(f.dir, "kv")
	cache, err := policytest.CacheDir()
	testenv.OK(t, err)
	cmd := command(t, dir, "--root", fmt.Sprintf("%s=%d", root, fuseCapacity), "--socket", "s", "--http-listen", anyPort,
		"--store-io-timeout", "1s", "--policy-cache", cache)
	cmd.Cancel = func() error { return nil } // a torture takes longer than a test's command may
	var stop func(os.Signal) int
	_, f.logged, stop = startCommand(t, cmd)
	f.address = httpAddress(t, f.logged)
	f.client = dialToKill(t, filepath.Join(dir, "s"))
	f.requests("")
	start, order := time.Now(), rng.Perm(len(misfortunes))
	for n := 0; n < 4 || time.Since(start) < *fuseTime && !t.Failed(); n++ { // the short run: some, and others the next time
		rules := misfortunes[order[n%len(order)]]
		f.suffer(strings.ReplaceAll(strings.ReplaceAll(rules, "%d", fmt.Sprint(rng.Uint32())), "%%", "%"))
		f.tally.Add(0, 0, 1)
		if n%len(order) == 3 {
			f.restart()
		}
	}
	t.Logf("%d requests: %d loaded and %d not, %d stored and %d not", f.asked, f.loaded, f.lost, f.stored, f.refused)
	if f.loaded == 0 || f.stored == 0 {
		t.Error("nothing was compared")
	}
	f.client.Close()
	if code := stop(syscall.SIGTERM); code != exitOK {
		t.Errorf("exit code %d\n%s", code, f.logged())
	}
	if r := finish(t, command(t, dir, "fsck", "--quiet", root)); r.code != exitOK && r.code != exitProblems {
		t.Errorf("fsck: %d\n%s%s", r.code, r.stdout, r.stderr)
	}
}

type fuseRoot struct {
	*testing.T
	under, dir, address string
	m                   *fusefs.Mount
	logged              func() string
	client              *killPeer
	rng                 *rand.Rand
	tally               *testenv.Tally

	asked, loaded, lost, stored, refused int64 // chunks
}

func (f *fuseRoot) mount() {
	f.Helper()
	var err error
	f.m, err = fusefs.New(f.under, f.dir)
	testenv.OK(f, err)
}

// suffer lets the client work under rules, and waits until the root is well again.
func (f *fuseRoot) suffer(rules string) {
	f.Helper()
	testenv.OK(f, f.m.Set(rules))
	f.requests(rules)
	testenv.OK(f, f.m.Set(""))
	testenv.Until(f, "the kernel forgets directories that are gone", func() bool { return !f.remembers() })
	f.recovers(rules)
}

// remembers reports whether the kernel still has a chunk's directory that a removal with an error has taken: it keeps names for a second, and no
// store makes the directory again until then.
func (f *fuseRoot) remembers() bool {
	namespaces, err := os.ReadDir(filepath.Join(f.under, "kv"))
	testenv.OK(f, err)
	for _, ns := range namespaces {
		for n := range fuseChunks {
			for _, dir := range []string{fmt.Sprintf("kv/%s/%02x", ns.Name(), n), fmt.Sprintf("kv/%s/%02x/0", ns.Name(), n)} {
				_, gone := os.Lstat(filepath.Join(f.under, dir))
				fd, err := unix.Open(filepath.Join(f.dir, dir), unix.O_PATH|unix.O_CLOEXEC, 0) // by name alone: attributes would be asked for
				if err != nil {
					continue
				}
				if testenv.OK(f, unix.Close(fd)); gone != nil {
					return true
				}
			}
		}
	}
	return false
}

// requests are some of the client's, which must be answered: what is there of a chunk is loaded and compared, what is not is stored.
func (f *fuseRoot) requests(rules string) {
	f.Helper()
	for range 8 {
		f.asked++
		n := f.rng.IntN(fuseChunks)
		l, err := f.client.Lookup(f.Context(), client.LookupRequest{Keys: []kv.Key{killKey(n)}})
		if err != nil {
			f.Fatalf("with %q: lookup: %v\n%s", rules, err, f.logged())
		}
		switch {
		case l.Hits() == 0 && f.client.outcome(n).Result == client.Stored:
			f.stored++
		case l.Hits() == 0:
			f.refused++
		case f.client.load(f.T, l, n):
			f.loaded++
		default:
			f.lost++
		}
		f.tally.Add(1, 0, 0)
	}
	if used := f.onDisk(); used > fuseCapacity {
		f.Fatalf("with %q: %d bytes on disk, of %d", rules, used, fuseCapacity)
	}
}

// recovers waits until the root takes stores, which the client would only be refused until then, and lets it work: nearly
// all that it offers must be stored. A root that was full takes no more than it had for a minute: there, something must be.
// Where an operation took longer than it may, as on a busy machine, the root went out of service once more, and tries again.
func (f *fuseRoot) recovers(rules string) {
	f.Helper()
	for range 5 {
		if f.stores(rules) {
			return
		}
	}
	f.Errorf("after %q: the root goes out of service again and again\n%s", rules, f.logged())
}

func (f *fuseRoot) outages() int64 { return gauge(f.T, f.address, "kvhost_root_outages_total") }

// stores waits until the root is in service, lets the client work, and judges its stores. It is false, and judges nothing, when
// the root went out of service during that.
func (f *fuseRoot) stores(rules string) bool {
	f.Helper()
	awaitGauge(f.T, f.address, "kvhost_root_stuck_operations", 0, f.logged)
	outages := f.outages() // read before the state, so that an outage between the two counts
	testenv.Until(f, fmt.Sprintf("a root in service after %q", rules), func() bool {
		if gauge(f.T, f.address, "kvhost_root_state") <= int64(health.Full) {
			return true
		}
		outages = f.outages()
		return false
	}, func() any { return f.logged() })
	full := gauge(f.T, f.address, "kvhost_root_state") == int64(health.Full)
	stored, refused := f.stored, f.refused
	for range 3 {
		f.requests("after " + rules)
	}
	stored, refused = f.stored-stored, f.refused-refused
	if f.outages() != outages {
		return false
	}
	if full && stored > 0 {
		return true
	}
	if stored < 9*refused {
		f.Errorf("after %q: %d chunks are stored and %d are not, though the root is in service\n%s", rules, stored, refused,
			f.logged())
	}
	return true
}

// restart kills the file system's server, and mounts again.
func (f *fuseRoot) restart() {
	f.Helper()
	testenv.OK(f, f.m.Kill())
	f.requests("a killed server")
	testenv.OK(f, f.m.Unmount())
	f.mount()
	f.recovers("a killed server")
	f.tally.Add(0, 1, 0)
}

// onDisk is what the files below the mount take, seen past it.
func (f *fuseRoot) onDisk() (bytes int64) {
	f.Helper()
	err := filepath.WalkDir(f.under, func(name string, e fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err != nil || e.IsDir() || !strings.HasSuffix(name, ".kv") && !strings.HasSuffix(name, ".tmp") {
			return err
		}
		var st syscall.Stat_t
		if syscall.Lstat(name, &st) == nil {
			bytes += st.Blocks * 512
		}
		return nil
	})
	testenv.OK(f, err)
	return bytes
}
