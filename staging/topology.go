package staging

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// NoNode means no NUMA node, as for a device of a virtual machine or a network file system.
const NoNode = -1

// Node is one NUMA node.
type Node struct {
	ID   int
	CPUs []int
}

// Topology tells which CPUs and devices are near each other, by the kernel's tree of devices.
type Topology struct {
	Sys string // the tree's directory
}

// SystemTopology is the topology of this machine.
func SystemTopology() Topology { return Topology{Sys: "/sys"} }

// Near is the node of a PCI device, with its CPUs. ok is false if there is no such node: the machine has one node, the
// device's node is unknown, or the node has no CPUs.
func (t Topology) Near(address string) (node Node, ok bool, err error) {
	nodes, err := t.Nodes()
	if err != nil || len(nodes) < 2 {
		return Node{ID: NoNode}, false, err
	}
	id, err := t.NodeOfPCI(address)
	if err != nil {
		return Node{ID: NoNode}, false, err
	}
	for _, n := range nodes {
		if n.ID == id && len(n.CPUs) > 0 {
			return n, true, nil
		}
	}
	return Node{ID: NoNode}, false, nil
}

// maxCPUs bounds a CPU list: more than any kernel supports.
const maxCPUs = 1 << 16

// parseCPUList parses a list such as "0-3,8,10-11" into ascending numbers without duplicates.
func parseCPUList(text string) ([]int, error) {
	var cpus []int
	text = strings.TrimSpace(text)
	if text == "" {
		return nil, nil
	}
	for part := range strings.SplitSeq(text, ",") {
		from, to, isRange := strings.Cut(part, "-")
		first, err := strconv.ParseUint(from, 10, 31)
		last := first
		if err == nil && isRange {
			last, err = strconv.ParseUint(to, 10, 31)
		}
		if err != nil || last < first || last >= maxCPUs || len(cpus) > maxCPUs {
			return nil, fmt.Errorf("staging: bad CPU list %q at %q", text, part)
		}
		for cpu := first; cpu <= last; cpu++ {
			cpus = append(cpus, int(cpu))
		}
	}
	slices.Sort(cpus)
	return slices.Compact(cpus), nil
}

// parsePCIAddress checks a PCI address and returns the form of the kernel's tree, "0000:3b:00.0": lower case, with a
// domain of at least four digits. CUDA writes eight digits, and lspci may omit the domain.
func parsePCIAddress(text string) (string, error) {
	parts := strings.Split(strings.ToLower(strings.TrimSpace(text)), ":")
	if len(parts) == 2 {
		parts = append([]string{"0"}, parts...)
	}
	if len(parts) == 3 {
		device, function, ok := strings.Cut(parts[2], ".")
		domain, err1 := strconv.ParseUint(parts[0], 16, 32)
		bus, err2 := strconv.ParseUint(parts[1], 16, 8)
		dev, err3 := strconv.ParseUint(device, 16, 5)
		fn, err4 := strconv.ParseUint(function, 16, 3)
		if ok && errors.Join(err1, err2, err3, err4) == nil {
			return fmt.Sprintf("%04x:%02x:%02x.%x", domain, bus, dev, fn), nil
		}
	}
	return "", fmt.Errorf("staging: bad PCI address %q, want one such as 0000:3b:00.0", text)
}

// Nodes lists the NUMA nodes with their CPUs. A kernel without NUMA has one node of all CPUs online.
func (t Topology) Nodes() ([]Node, error) {
	dirs, err := filepath.Glob(filepath.Join(t.Sys, "devices/system/node/node[0-9]*"))
	if err != nil {
		return nil, err
	}
	var nodes []Node
	for _, dir := range dirs {
		id, err := strconv.Atoi(strings.TrimPrefix(filepath.Base(dir), "node"))
		if err != nil {
			continue
		}
		cpus, err := readCPUs(filepath.Join(dir, "cpulist"))
		if err != nil {
			return nil, err
		}
		nodes = append(nodes, Node{ID: id, CPUs: cpus})
	}
	if len(nodes) == 0 {
		cpus, err := readCPUs(filepath.Join(t.Sys, "devices/system/cpu/online"))
		if err != nil {
			return nil, err
		}
		nodes = []Node{{CPUs: cpus}}
	}
	slices.SortFunc(nodes, func(a, b Node) int { return a.ID - b.ID })
	return nodes, nil
}

func readCPUs(name string) ([]int, error) {
	text, err := os.ReadFile(name)
	if err != nil {
		return nil, err
	}
	return parseCPUList(string(text))
}

// NodeOfPCI is the node of a PCI device, or NoNode if it is unknown.
func (t Topology) NodeOfPCI(address string) (int, error) {
	address, err := parsePCIAddress(address)
	if err != nil {
		return NoNode, err
	}
	return readNode(filepath.Join(t.Sys, "bus/pci/devices", address))
}

// NodeOfPath is the node of the block device below a path. It is NoNode if there is no such device, if its node is
// unknown, or if it consists of devices on several nodes.
func (t Topology) NodeOfPath(path string) (int, error) {
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		return NoNode, pathError("stat", path, err)
	}
	return t.nodeOfDevice(uint64(st.Dev)), nil
}

func (t Topology) nodeOfDevice(dev uint64) int {
	link := filepath.Join(t.Sys, "dev/block", fmt.Sprintf("%d:%d", unix.Major(dev), unix.Minor(dev)))
	dir, err := filepath.EvalSymlinks(link)
	if err != nil {
		return NoNode
	}
	return t.nodeOfBlock(dir, 8)
}

// nodeOfBlock returns the numa_node of a block device's controller, which is the nearest one up the tree, or of the
// devices that it consists of.
func (t Topology) nodeOfBlock(dir string, depth int) int {
	parts, _ := filepath.Glob(filepath.Join(dir, "slaves/*"))
	if len(parts) > 0 && depth > 0 {
		node := NoNode
		for i, part := range parts {
			real, err := filepath.EvalSymlinks(part)
			if err != nil {
				return NoNode
			}
			n := t.nodeOfBlock(real, depth-1)
			if i > 0 && n != node {
				return NoNode
			}
			node = n
		}
		return node
	}
	top, err := filepath.EvalSymlinks(t.Sys)
	if err != nil {
		return NoNode
	}
	for ; len(dir) > len(top); dir = filepath.Dir(dir) {
		if node, err := readNode(dir); err == nil {
			return node
		}
	}
	return NoNode
}

// readNode reads a device's numa_node. A negative number means none.
func readNode(dir string) (int, error) {
	text, err := os.ReadFile(filepath.Join(dir, "numa_node"))
	if err != nil {
		return NoNode, err
	}
	node, err := strconv.Atoi(strings.TrimSpace(string(text)))
	if err != nil {
		return NoNode, fmt.Errorf("staging: %s: %w", filepath.Join(dir, "numa_node"), err)
	}
	return max(node, NoNode), nil
}
