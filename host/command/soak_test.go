package command

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/internal/replay"
	"github.com/kvhost/kvhost/host/internal/testkit/hosttest"
	"github.com/kvhost/kvhost/host/internal/testkit/peerdouble"
	"github.com/kvhost/kvhost/host/internal/testkit/s3double"
	"github.com/kvhost/kvhost/host/kv"
)

var (
	soakTime = flag.Duration("soak.time", 0, "how long TestSoak goes on after each misfortune was had once")
	soakSeed = flag.Uint64("soak.seed", 0, "of the misfortunes of TestSoak; 0 takes a fresh one")
)

const soakMemory = 256 << 20 // max_memory

// soakHost is one of two hosts that lend each other, with memory, a disk and a bucket, and a liar for its other peer.
type soakHost struct {
	dir, socket string
	start       func() // again
	process     *os.Process
	logged      func() string
	stop        func(os.Signal) int
}

// TestSoak has clients store and load at two hosts that lend each other, with memory, a disk and a bucket each, while hosts are killed, ended, paused and
// reloaded, the bucket's server lies and fails, another peer lies all the while, and attackers take what they get of the peers' port. Nothing wrong
// is loaded, the hosts' memory is bounded as the kernel counts it, and their disks are as they say.
func TestSoak(t *testing.T) {
	t.Parallel() // it waits more than it works
	tally := testenv.NewTally(t, "soak")
	seed := testenv.Seed(t, "soak.seed", *soakSeed)
	random := rand.New(rand.NewPCG(seed, 54))
	dir := shortDir(t)

	bytes, err := replay.Shape{Ranks: 1, ChunkBytes: bucketChunk, PageBytes: bucketChunk, Layers: 1}.EntryBytes(t.Context(), nil, nil)
	testenv.OK(t, err)
	space := hosttest.Hello("", kv.Uniform(1, 1, 1, bucketChunk)).Namespace
	liar := peerdouble.NewLiar(t, seed, uint64(bytes))
	for n := range uint64(bucketKeys) {
		liar.Has = append(liar.Has, kv.Fingerprint(space.Digest(), 0, bucketKey(n)))
	}
	lies := liar.Serve(t, "127.0.0.1:0")
	server := s3double.Start(t)
	bucket := s3double.StartLiar(t, server, seed)
	away := s3double.StartProxy(t, bucket.URL)

	var at []string
	for range 2 {
		free, err := net.Listen("tcp", "127.0.0.1:0")
		testenv.OK(t, err)
		at = append(at, free.Addr().String())
		defer free.Close()
		testenv.OK(t, free.Close())
	}
	var hosts []*soakHost
	for n := range at {
		h := &soakHost{dir: filepath.Join(dir, fmt.Sprint(n))}
		testenv.OK(t, os.Mkdir(h.dir, 0o700))
		h.socket = filepath.Join(h.dir, "s")
		text := fmt.Sprintf("socket = \"s\"\nmax_memory = %d\n[http]\nlisten = %q\n[session]\nmax_sessions = 16\n[engine]\nmax_staging_memory = \"64MiB\"\n[store]\nmemory = %d\n[[root]]\npath = \"kv\"\ncapacity = %d\n"+
			"[[root]]\npath = \"s3://bucket/%d\"\nendpoint = %q\npath_style = true\ncapacity = %d\nlevel = 1\n[peers]\nlisten = %q\nhosts = %q\n",
			soakMemory, anyPort, bytes*16, bytes*40, n, away.URL, bytes*60, at[n], at[1-n]+","+lies)
		conf := write(t, h.dir, "k.toml", text)
		h.start = func() {
			cmd := command(t, h.dir, "--config", conf, "--log-format", "json")
			for i, v := range cmd.Env {
				if v == noMemory {
					cmd.Env[i] = "AWS_ACCESS_KEY_ID=key"
				}
			}
			cmd.Env = append(cmd.Environ(), "AWS_SECRET_ACCESS_KEY=secret")
			_, h.logged, h.stop = startCommand(t, cmd)
			h.process = cmd.Process
		}
		h.start()
		hosts = append(hosts, h)
	}

	ctx, stop := context.WithCancel(t.Context())
	var work sync.WaitGroup
	defer work.Wait()
	defer stop()
	var loads, stores, wrong, fails atomic.Int64
	for i, h := range hosts {
		for j := range 2 {
			work.Go(func() {
				g := rand.New(rand.NewPCG(seed+uint64(i), uint64(j)))
				for ctx.Err() == nil {
					if err := storeAndLoad(ctx, h.socket, g, &loads, &stores, &fails); errors.Is(err, errWrongBytes) {
						wrong.Add(1)
						t.Error(err)
					}
					time.Sleep(50 * time.Millisecond) // the host is gone
				}
			})
		}
	}
	more := func(of int64) {
		t.Helper()
		begun := loads.Load()
		until(t, fmt.Sprintf("%d loads more", of), func() bool { return t.Failed() || loads.Load() >= begun+of }, func() any {
			return fmt.Sprintf("%d loads, %d of them failed, %d stores", loads.Load()-begun, fails.Load(), stores.Load())
		})
		if t.Failed() {
			t.FailNow()
		}
	}
	var most int64
	remember := func() {
		for _, h := range hosts {
			most = max(most, resident(t, h.process.Pid))
		}
	}
	nothing := func() {}
	misfortunes := map[string]func(h *soakHost, n int) (end func()){
		"kill": func(h *soakHost, _ int) func() { h.stop(syscall.SIGKILL); return h.start },
		"end":  func(h *soakHost, _ int) func() { h.stop(syscall.SIGTERM); return h.start },
		"pause": func(h *soakHost, _ int) func() {
			testenv.OK(t, h.process.Signal(syscall.SIGSTOP))
			return func() { testenv.OK(t, h.process.Signal(syscall.SIGCONT)) }
		},
		"reload":             func(h *soakHost, _ int) func() { testenv.OK(t, h.process.Signal(syscall.SIGHUP)); return nothing },
		"lies of the bucket": func(*soakHost, int) func() { bucket.Lie(true); return func() { bucket.Lie(false) } },
		"no bucket": func(*soakHost, int) func() {
			away.Set(s3double.Rule{Fault: s3double.Stall})
			return func() { away.Set() }
		},
		"failures of the bucket": func(*soakHost, int) func() {
			away.Set(s3double.Rule{Fault: s3double.Reset, Every: 3}, s3double.Rule{Fault: s3double.Wrong, Every: 5})
			return func() { away.Set() }
		},
		"attack": func(h *soakHost, n int) func() {
			what := []string{"connections", "streams", "half messages", "buffers", "leases", "keys", "entries", "turns", "questions"}[n%9]
			a := &attack{What: what, From: "127.0.0.3", To: at[0], Namespace: space.Digest(), Bytes: uint64(bytes), Keys: []kv.Key{bucketKey(1), bucketKey(2)}, Nothing: true}
			return a.start(t)
		},
	}
	had := map[string]int{}
	names := []string{"kill", "end", "pause", "reload", "lies of the bucket", "no bucket", "failures of the bucket", "attack"}
	more(100)
	begun := time.Now()
	for n := 0; n < len(names) || time.Since(begun) < *soakTime; n++ {
		name := names[n%len(names)]
		if n >= len(names) {
			name = names[random.IntN(len(names))]
		}
		h := hosts[random.IntN(2)]
		end := misfortunes[name](h, random.IntN(9))
		for last := time.Now().Add(time.Duration(random.IntN(20)) * *soakTime / 2000); time.Now().Before(last); time.Sleep(20 * time.Millisecond) {
			if t.Failed() {
				t.FailNow()
			}
		}
		remember()
		end()
		had[name]++
		more(20)
		tally.Add(0, int64(strings.Count(name, "kill")), 0)
	}
	bucket.Lie(false)
	more(100)
	remember()
	stop()
	work.Wait()
	tally.Add(loads.Load()+stores.Load(), 0, 1)
	t.Logf("%d stores, %d loads, %d loads failed, %d wrong; misfortunes %v; %d lies of the peer, %d of the bucket; at most %d MiB of a host", stores.Load(), loads.Load(),
		fails.Load(), wrong.Load(), had, liar.Lies(), bucket.Lies(), most>>20)
	if most > soakMemory {
		t.Errorf("a host has %d bytes of memory as the kernel counts it, want at most %d", most, soakMemory)
	}
	for _, h := range hosts {
		if code := h.stop(syscall.SIGTERM); code != exitOK {
			t.Errorf("a host ended with exit code %d", code)
		}
		if r := finish(t, command(t, h.dir, "fsck", "kv")); r.code != exitOK {
			t.Errorf("fsck: exit code %d\n%s%s", r.code, r.stdout, r.stderr)
		}
	}
}
