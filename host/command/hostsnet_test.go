package command

import (
	"crypto/x509"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/internal/proto"
	"github.com/kvhost/kvhost/host/internal/testkit/certificates"
)

// cluster is hosts that lend each other, each a process. Apart, each has a network namespace, an address on a bridge between them, and a
// certificate; otherwise they have ports of loopback.
type cluster struct {
	*testing.T
	apart    bool
	capacity int64 // of each
	dir      string
	members  []*member
}

// hostsAreApart says whether hosts get network namespaces.
func hostsAreApart(t *testing.T) bool {
	_, err := exec.LookPath("ip")
	may := err == nil && os.Geteuid() == 0 && testenv.Mounts.Have()
	if *hostsApart && !may {
		t.Log("the hosts are on loopback: namespaces of the network take root and ip")
	}
	return *hostsApart && may
}

// member is one of the hosts.
type member struct {
	dir, addr string
	space     string // network namespace
	process   *os.Process
	stop      func(os.Signal) int
	player    *player
}

func (m *member) root() string { return filepath.Join(m.dir, "kv") }

// command runs one that must succeed.
func (c *cluster) command(args ...string) {
	c.Helper()
	if out, err := exec.Command(args[0], args[1:]...).CombinedOutput(); err != nil {
		c.Fatalf("%v: %v\n%s", args, err, out)
	}
}

func newCluster(t *testing.T, n int, capacity int64, apart bool) *cluster {
	t.Helper()
	c := &cluster{T: t, apart: apart, capacity: capacity, dir: testenv.Dir(t)}
	var signer *certificates.Authority
	if apart {
		c.spaces(n)
		signer = certificates.New(t)
		write(t, c.dir, "ca", string(signer.PEM))
	}
	for i := range n {
		m := &member{dir: filepath.Join(c.dir, fmt.Sprint(i))}
		testenv.OK(t, os.Mkdir(m.dir, 0o700))
		if apart {
			address := fmt.Sprintf("10.99.0.%d", i+1)
			m.space, m.addr = c.space(i), address+":9477"
			signer.Pair(t, filepath.Join(m.dir, "cert"), filepath.Join(m.dir, "key"), address, x509.Certificate{})
		} else {
			free, err := net.Listen("tcp", "127.0.0.1:0")
			testenv.OK(t, err)
			m.addr = free.Addr().String()
			defer free.Close() // all are taken before one is free again
		}
		c.members = append(c.members, m)
	}
	return c
}

// start starts the host of a member, with all others and itself for its peers.
func (c *cluster) start(m *member) {
	c.Helper()
	var hosts []string
	for _, o := range c.members {
		hosts = append(hosts, o.addr)
	}
	text := fmt.Sprintf("socket = \"s\"\n[http]\nlisten = \"\"\n[store]\nmemory = 0\n[[root]]\npath = \"kv\"\ncapacity = %d\n", c.capacity)
	if len(hosts) > 1 {
		text += fmt.Sprintf("[peers]\nlisten = %q\nhosts = %q\n", m.addr, strings.Join(hosts, ","))
	}
	if c.apart && len(hosts) > 1 {
		text += fmt.Sprintf("cert = \"cert\"\nkey = \"key\"\nca = %q\n", filepath.Join(c.dir, "ca"))
	}
	cmd := command(c.T, m.dir, "--config", write(c.T, m.dir, "k.toml", text), "--log-format", "json")
	if m.space != "" { // ip becomes the host, and keeps its number
		ip, err := exec.LookPath("ip")
		testenv.OK(c.T, err)
		cmd.Path, cmd.Args = ip, append([]string{"ip", "netns", "exec", m.space}, cmd.Args...)
	}
	_, _, m.stop = startCommand(c.T, cmd)
	m.process = cmd.Process
	m.player = newPlayer(c.T, filepath.Join(m.dir, "s"))
}

// await waits until all members' hosts know as many peers as they should, with the entries that these have.
func (c *cluster) await(peers int) {
	c.Helper()
	for _, m := range c.members {
		until(c.T, fmt.Sprintf("%d peers of %s", peers, m.addr), func() bool {
			n := 0
			for _, p := range c.peers(m) {
				if p.GetState() == "here" {
					n++
				}
			}
			return n == peers
		})
	}
}

// status is what a member's host says of itself.
func (c *cluster) status(m *member) *proto.StatusResponse {
	c.Helper()
	s, err := proto.Status(c.Context(), filepath.Join(m.dir, "s"))
	testenv.OK(c.T, err)
	return s
}

// peers are what a member knows of the others, by address.
func (c *cluster) peers(m *member) map[string]*proto.PeerStatus {
	c.Helper()
	list := map[string]*proto.PeerStatus{}
	for _, p := range c.status(m).GetPeers() {
		list[p.GetAddress()] = p
	}
	return list
}

// spaces makes the namespaces of n members, and one with the bridge between them.
func (c *cluster) spaces(n int) {
	c.Helper()
	hub := c.space(-1)
	c.command("ip", "netns", "add", hub)
	c.Cleanup(func() { c.command("ip", "netns", "del", hub) })
	c.command("ip", "-n", hub, "link", "add", "bridge0", "type", "bridge")
	c.command("ip", "-n", hub, "link", "set", "bridge0", "up")
	for i := range n {
		space, link := c.space(i), fmt.Sprintf("h%d", i)
		c.command("ip", "netns", "add", space)
		c.Cleanup(func() { c.command("ip", "netns", "del", space) })
		c.command("ip", "-n", hub, "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", space)
		c.command("ip", "-n", hub, "link", "set", link, "master", "bridge0", "up")
		c.command("ip", "-n", space, "address", "add", fmt.Sprintf("10.99.0.%d/24", i+1), "dev", "eth0")
		for _, dev := range []string{"lo", "eth0"} {
			c.command("ip", "-n", space, "link", "set", dev, "up")
		}
		if *hostsLoss > 0 {
			c.command("ip", "netns", "exec", space, "iptables", "-A", "INPUT", "-i", "eth0", "-m", "statistic", "--mode", "random",
				"--probability", fmt.Sprint(*hostsLoss), "-j", "DROP")
		}
	}
}

func (c *cluster) space(i int) string { return fmt.Sprintf("kvhost-%d-%d", os.Getpid(), i+1) }

// link takes a member's link down or up: what is on its way is lost, and nothing says so.
func (c *cluster) link(i int, state string) {
	c.Helper()
	c.command("ip", "-n", c.space(-1), "link", "set", fmt.Sprintf("h%d", i), state)
}

// signal stops a member's process, or lets it go on.
func (c *cluster) signal(m *member, s syscall.Signal) {
	c.Helper()
	testenv.OK(c.T, m.process.Signal(s))
}
