package host_test

import (
	"bufio"
	"fmt"
	"net"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/client"
	"github.com/kvhost/kvhost/host/internal/proto"
	"github.com/kvhost/kvhost/host/internal/testkit/hosttest"
	"github.com/kvhost/kvhost/host/kv"
)

// crowdOf is the environment variable that makes TestCrowdsLeaveTheStoreItsFiles the crowd: addresses to connect to.
const crowdOf = "KVHOST_TEST_CROWD_OF"

// However many connections clients open, and with a message half sent on each, the store can open its files: what is stored
// is a hit and can be loaded, and what is new is stored.
func TestCrowdsLeaveTheStoreItsFiles(t *testing.T) {
	const files, connections = 512, 1200
	if to := os.Getenv(crowdOf); to != "" {
		crowd(strings.Split(to, " "), connections)
		return
	}
	var limit unix.Rlimit
	testenv.OK(t, unix.Getrlimit(unix.RLIMIT_NOFILE, &limit))
	few := unix.Rlimit{Cur: files, Max: limit.Max}
	testenv.OK(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &few))
	t.Cleanup(func() { _ = unix.Setrlimit(unix.RLIMIT_NOFILE, &limit) })
	h, _ := hosttest.Start(t, configuration(t))
	s := dial(t, h)
	const before, after = 20, 40
	key := func(n int) kv.Key { return kv.Key{byte(n), 1} }
	for n := range before {
		s.Put(client.StoreChunk{Key: key(n), Blocks: []uint32{0, 1}})
	}
	cmd := exec.Command(os.Args[0], "-test.run=^TestCrowdsLeaveTheStoreItsFiles$")
	cmd.Env = append(os.Environ(), crowdOf+"=unix:"+h.Socket()+" unix:"+h.Socket()+proto.DescriptorSuffix+" tcp:"+h.HTTPAddr())
	out, err := cmd.StdoutPipe()
	testenv.OK(t, err)
	in, err := cmd.StdinPipe()
	testenv.OK(t, err)
	testenv.OK(t, cmd.Start())
	defer func() { _ = in.Close(); _ = cmd.Wait() }()
	if line, err := bufio.NewReader(out).ReadString('\n'); err != nil || line != "full\n" {
		t.Fatalf("the crowd says %q, %v", line, err)
	}
	open, err := os.ReadDir("/proc/self/fd")
	testenv.OK(t, err)
	t.Logf("%d of %d descriptors are open", len(open), files)
	if len(open) > files/2 {
		t.Errorf("%d of %d descriptors are open, want half of them left for the store", len(open), files)
	}
	for n := before; n < after; n++ {
		if r := s.Put(client.StoreChunk{Key: key(n), Blocks: []uint32{0, 1}}); r.Bytes == 0 {
			t.Errorf("store of chunk %d: %+v, want it stored", n, r)
		}
	}
	for n := range after {
		l := s.Find(key(n))
		if l.Hits() != 1 {
			t.Errorf("chunk %d: %d hits, want 1", n, l.Hits())
		} else if r := s.Get(l, client.LoadOptions{}, client.LoadChunk{Blocks: []uint32{4, 5}}); len(r.Failed) > 0 {
			t.Errorf("load of chunk %d: %+v, want no failed block", n, r)
		}
	}
}

// crowd opens so many connections to each address, and sends less than is wanted on each.
func crowd(addresses []string, each int) {
	var open []net.Conn
	for _, address := range addresses {
		network, to, _ := strings.Cut(address, ":")
		for range each {
			c, err := net.DialTimeout(network, to, time.Second)
			if err != nil {
				break // it accepts no more
			}
			_, _ = c.Write([]byte("PRI"))
			open = append(open, c)
		}
	}
	fmt.Println("full")
	_, _ = os.Stdin.Read(make([]byte, 1)) // until the test closes it
	for _, c := range open {
		c.Close()
	}
}
