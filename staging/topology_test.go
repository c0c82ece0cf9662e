package staging

import (
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

func TestParseCPUList(t *testing.T) {
	for _, c := range []struct {
		text string
		want []int
		bad  bool
	}{
		{text: "0-3,8,10-11\n", want: []int{0, 1, 2, 3, 8, 10, 11}},
		{text: "5", want: []int{5}},
		{text: ""}, {text: "\n"},
		{text: "7,1-2,2-3", want: []int{1, 2, 3, 7}},
		{text: "3-1", bad: true}, {text: "a", bad: true}, {text: "1,", bad: true}, {text: "-1", bad: true},
		{text: "1-", bad: true}, {text: "0-9999999999", bad: true}, {text: "65536", bad: true}, {text: strings.Repeat("0-65535,", 99) + "1", bad: true}, {text: "0-3:1/2", bad: true},
	} {
		got, err := parseCPUList(c.text)
		if (err != nil) != c.bad || !slices.Equal(got, c.want) {
			t.Errorf("CPU list %q is parsed as %v, error %v, want %v", c.text, got, err, c.want)
		}
	}
}

func FuzzParseCPUList(f *testing.F) {
	f.Add("0-3,8,10-11\n")
	f.Fuzz(func(t *testing.T, text string) {
		cpus, err := parseCPUList(text)
		if err != nil && cpus != nil || !slices.IsSorted(cpus) || len(cpus) > maxCPUs {
			t.Fatalf("%d CPUs, %v", len(cpus), err)
		}
	})
}

func TestParsePCIAddress(t *testing.T) {
	for text, want := range map[string]string{
		"0000:3b:00.0":       "0000:3b:00.0",
		"00000000:3B:00.0":   "0000:3b:00.0",
		"3b:00.1\n":          "0000:3b:00.1",
		"10000:01:1f.7":      "10000:01:1f.7",
		"0000:3b:00":         "",
		"0000:3b:20.0":       "",
		"0000:3b:00.8":       "",
		"0000:3bc:00.0":      "",
		"":                   "",
		"../../etc:00:00.0":  "",
		"0:0:0:0.0":          "",
		"100000000:00:00.0":  "",
		"0000:3b:00.0/../..": "",
	} {
		got, err := parsePCIAddress(text)
		if got != want || (err == nil) != (want != "") {
			t.Errorf("PCI address %q is parsed as %q, error %v, want %q", text, got, err, want)
		}
	}
}

// tree makes a part of /sys: files of text, and links where the text begins with "->".
func tree(t *testing.T, files map[string]string) Topology {
	t.Helper()
	root := t.TempDir()
	for name, text := range files {
		name = filepath.Join(root, name)
		must(t, os.MkdirAll(filepath.Dir(name), 0o700))
		if len(text) > 2 && text[:2] == "->" {
			must(t, os.Symlink(filepath.Join(root, text[2:]), name))
			continue
		}
		put(t, name, text)
	}
	return Topology{Sys: root}
}

func TestTopology(t *testing.T) {
	top := tree(t, map[string]string{
		"devices/system/node/node0/cpulist":                     "0-1,4-5\n",
		"devices/system/node/node1/cpulist":                     "2-3\n",
		"devices/system/node/node10/cpulist":                    "\n",
		"devices/pci0/0000:3b:00.0/numa_node":                   "1\n",
		"devices/pci0/0000:3b:00.0/nvme/nvme0/nvme0n1/n1p1/dev": "259:1\n",
		"devices/pci0/0000:00:01.0/numa_node":                   "-1\n",
		"devices/pci0/0000:00:02.0/numa_node":                   "what\n",
		"devices/pci0/0000:00:01.0/virtio0/block/vda/dev":       "254:0\n",
		"devices/virtual/block/dm-0/slaves/nvme0n1":             "->devices/pci0/0000:3b:00.0/nvme/nvme0/nvme0n1",
		"devices/virtual/block/dm-0/slaves/n1p1":                "->devices/pci0/0000:3b:00.0/nvme/nvme0/nvme0n1/n1p1",
		"devices/virtual/block/dm-1/slaves/dm-0":                "->devices/virtual/block/dm-0",
		"devices/virtual/block/dm-1/slaves/vda":                 "->devices/pci0/0000:00:01.0/virtio0/block/vda",
		"devices/virtual/block/dm-2/slaves/dm-2":                "->devices/virtual/block/dm-2",
		"devices/virtual/block/loop0/dev":                       "7:0\n",
		"dev/block/259:1":                                       "->devices/pci0/0000:3b:00.0/nvme/nvme0/nvme0n1/n1p1",
		"dev/block/254:0":                                       "->devices/pci0/0000:00:01.0/virtio0/block/vda",
		"dev/block/253:0":                                       "->devices/virtual/block/dm-0",
		"dev/block/253:1":                                       "->devices/virtual/block/dm-1",
		"dev/block/253:2":                                       "->devices/virtual/block/dm-2",
		"dev/block/7:0":                                         "->devices/virtual/block/loop0",
		"bus/pci/devices/0000:3b:00.0":                          "->devices/pci0/0000:3b:00.0",
		"bus/pci/devices/0000:00:01.0":                          "->devices/pci0/0000:00:01.0",
		"bus/pci/devices/0000:00:02.0":                          "->devices/pci0/0000:00:02.0",
	})
	nodes, err := top.Nodes()
	if want := []Node{{0, []int{0, 1, 4, 5}}, {1, []int{2, 3}}, {10, nil}}; err != nil || !reflect.DeepEqual(nodes, want) {
		t.Errorf("nodes %v %v", nodes, err)
	}
	for dev, want := range map[[2]uint32]int{
		{259, 1}: 1, {254, 0}: NoNode, {253, 0}: 1, {253, 1}: NoNode, {253, 2}: NoNode, {7, 0}: NoNode, {0, 40}: NoNode,
	} {
		if got := top.nodeOfDevice(unix.Mkdev(dev[0], dev[1])); got != want {
			t.Errorf("device %v: node %d, want %d", dev, got, want)
		}
	}
	for _, c := range []struct {
		address string
		node    int
		bad     bool
	}{{"00000000:3B:00.0", 1, false}, {"0000:00:01.0", NoNode, false}, {"0000:00:02.0", NoNode, true}, {"0000:99:00.0", NoNode, true}, {"x", NoNode, true}} {
		if node, err := top.NodeOfPCI(c.address); node != c.node || (err != nil) != c.bad {
			t.Errorf("node of the device %s: %d, error %v, want %d", c.address, node, err, c.node)
		}
	}
	for address, want := range map[string]bool{"0000:3b:00.0": true, "0000:00:01.0": false, "0000:00:02.0": false, "0000:99:00.0": false} {
		node, ok, err := top.Near(address)
		if ok != want || ok && (node.ID != 1 || !slices.Equal(node.CPUs, []int{2, 3})) || !ok && node.ID != NoNode || ok && err != nil {
			t.Errorf("near %s: %v %v %v", address, node, ok, err)
		}
	}
	if _, err := top.NodeOfPath(filepath.Join(t.TempDir(), "none")); err == nil {
		t.Error("a path that is not there has a node")
	}
	uniform := tree(t, map[string]string{"devices/system/cpu/online": "0-2\n"})
	if nodes, err := uniform.Nodes(); err != nil || !reflect.DeepEqual(nodes, []Node{{0, []int{0, 1, 2}}}) {
		t.Errorf("without NUMA: %v %v", nodes, err)
	}
	single := tree(t, map[string]string{
		"devices/system/node/node0/cpulist": "0-1\n", "bus/pci/devices/0000:3b:00.0/numa_node": "0\n",
	})
	if _, ok, err := single.Near("0000:3b:00.0"); ok || err != nil {
		t.Errorf("on one node something is near: %v %v", ok, err)
	}
	if _, err := tree(t, nil).Nodes(); err == nil {
		t.Error("nodes of nothing")
	}
	broken := tree(t, map[string]string{"devices/system/node/node0/cpulist": "zero\n"})
	if _, err := broken.Nodes(); err == nil {
		t.Error("nodes of nonsense")
	}
}

func TestThisMachine(t *testing.T) {
	nodes, err := SystemTopology().Nodes()
	if err != nil || len(nodes) == 0 {
		t.Fatalf("nodes of this machine: %v, error %v, want some", nodes, err)
	}
	node, err := SystemTopology().NodeOfPath(t.TempDir())
	if err != nil || node < NoNode {
		t.Fatalf("node of the temporary directory: %d, error %v", node, err)
	}
}
