package devices

import (
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/gds"
	"github.com/kvhost/kvhost/staging"
)

// GPUs are placed by what the kernel's tree of devices says of them: on two nodes, in a virtual machine that does not
// say, and on a machine with one node, where nothing is nearer.
func TestGPUsArePlaced(t *testing.T) {
	devices := []gds.Device{{UUID: gds.UUID{1}, PCI: "0000:3b:00.0"}, {UUID: gds.UUID{2}, PCI: "0000:af:00.0"}, {UUID: gds.UUID{3}, PCI: "0000:b0:00.0"}}
	for name, c := range map[string]struct {
		nodes []string // their CPUs
		gpus  []string // their nodes
		cpus  [][]int
		want  []int
	}{
		"two sockets": {[]string{"0-3", "4-7"}, []string{"0", "1", "1"}, [][]int{{0, 1, 2, 3}, {4, 5, 6, 7}, {4, 5, 6, 7}}, []int{0, 1}},
		"one of two":  {[]string{"0-3", "4-7"}, []string{"1", "1", "-1"}, [][]int{{4, 5, 6, 7}, {4, 5, 6, 7}, nil}, []int{1}},
		"memory only": {[]string{"0-3", ""}, []string{"1", "0", "0"}, [][]int{nil, {0, 1, 2, 3}, {0, 1, 2, 3}}, []int{0}},
		"not said":    {[]string{"0-3", "4-7"}, []string{"-1", "-1", "-1"}, [][]int{nil, nil, nil}, nil},
		"one node":    {[]string{"0-7"}, []string{"0", "0", "0"}, [][]int{nil, nil, nil}, nil},
		"no tree":     {nil, nil, [][]int{nil, nil, nil}, nil},
	} {
		sys := t.TempDir()
		put := func(name, text string) {
			t.Helper()
			name = filepath.Join(sys, name)
			testenv.OK(t, os.MkdirAll(filepath.Dir(name), 0o700))
			testenv.OK(t, os.WriteFile(name, []byte(text+"\n"), 0o600))
		}
		for i, cpus := range c.nodes {
			put("devices/system/node/node"+string(rune('0'+i))+"/cpulist", cpus)
		}
		for i, node := range c.gpus {
			put("bus/pci/devices/"+devices[i].PCI+"/numa_node", node)
		}
		d := &Devices{log: slog.New(slog.DiscardHandler)}
		places, nodes := d.numaNodes(staging.Topology{Sys: sys}, devices)
		if !slices.Equal(nodes, c.want) {
			t.Errorf("%s: nodes %v, want %v", name, nodes, c.want)
		}
		for i, dev := range devices {
			if got := places[dev.UUID].CPUs; !slices.Equal(got, c.cpus[i]) {
				t.Errorf("%s: GPU %d on %v, want %v", name, i, got, c.cpus[i])
			}
		}
	}
}
