package server

import (
	"log/slog"
	"os"
	"strings"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/kvhost/kvhost/gds"
	"github.com/kvhost/kvhost/host/internal/budget"
	"github.com/kvhost/kvhost/host/internal/proto"
	"github.com/kvhost/kvhost/host/internal/transfer"
	"github.com/kvhost/kvhost/host/kv"
)

// clientMemory is the memory of a client that a session has mapped: files, and allocations of a GPU. It is used with the
// session's turn held. The exception is the received descriptors, which have a mutex because they arrive on another socket.
type clientMemory struct {
	limits *Limits
	total  *atomic.Int64 // bytes mapped by all sessions
	gpus   []*gds.GPU    // GPUs of this host
	share  *budget.Session
	log    *slog.Logger
	// protect makes missing pages of a mapping fail with SIGBUS.
	protect func([]byte) error

	uid      uint32   // user of the client's process; descriptors are accepted only from this user
	trusted  bool     // the client runs as root or as the host's user
	unsealed bool     // HELLO allows memory that can shrink
	device   string   // UUID of the client's GPU, or the text in HELLO if it is no UUID
	gpu      *gds.GPU // GPU with that UUID; nil if this host has none

	withdrawals *sharedSemaphores // word for withdrawals; nil before WITHDRAWALS

	regs   map[uint32]*registration // by group
	files  map[fileID]*mapping
	mapped int64 // bytes of mapped files

	mu          sync.Mutex
	closed      bool
	descriptors map[uint64]*os.File // by tag; received and not taken yet
}

// registration holds the pages of a group in a session. All fields but closing are set before it is entered in the session's
// table.
type registration struct {
	group   *kv.Group
	units   int // units of the session
	memory  transfer.Memory
	maps    []*mapping
	imports []*gds.Import // imported allocations of a GPU
	tables  int           // regions charged to the session's share
	closing bool          // an UNREGISTER is under way
}

// registered returns the registration of a group.
func (c *clientMemory) registered(group uint32) (*registration, error) {
	r := c.regs[group]
	switch {
	case r == nil:
		return nil, faultf(proto.Code_CODE_UNKNOWN, "group", "%d is not registered", group)
	case r.closing:
		return nil, faultf(proto.Code_CODE_BUSY, "group", "%d is being unregistered", group)
	}
	return r, nil
}

// unregister removes and unmaps a registration. The caller must ensure that no copy can touch its pages.
func (c *clientMemory) unregister(r *registration) {
	delete(c.regs, r.group.ID)
	c.unmap(r)
}

// close unmaps all registrations. The caller must ensure that no copy can touch their pages.
func (c *clientMemory) close() {
	for _, r := range c.regs {
		c.unregister(r)
	}
}

// semaphores reads and writes the timeline semaphores of a session.
type semaphores interface {
	Load(i int) (uint64, error)
	Store(i int, v uint64) error
}

// sharedSemaphores holds semaphores and the memory that contains them.
type sharedSemaphores struct {
	semaphores
	count   int
	mapping *mapping      // set if they are in host memory
	keep    *registration // set if they are in the memory of a GPU
	device  *gds.Semaphores
}

func (c *clientMemory) unmap(r *registration) {
	for _, m := range r.maps {
		c.unmapFile(m)
	}
	for _, m := range r.imports {
		if err := m.Close(); err != nil {
			c.log.Error("cannot unmap device memory", "error", err)
		}
	}
	c.share.Give(budget.Regions, int64(r.tables))
	r.maps, r.imports, r.memory, r.tables = nil, nil, nil, 0
}

// checkFile returns the id of a file, or an error if it does not qualify for mapping.
func (c *clientMemory) checkFile(f *os.File) (fileID, error) {
	id, err := identify(f, c.unsealed)
	if err != nil {
		return id, invalid("memfd", "%v", err)
	}
	return id, nil
}

// mapFile returns a mapping of the file and adds a user to it. A file that the session has mapped already is not mapped again.
func (c *clientMemory) mapFile(f *os.File) (*mapping, error) {
	id, err := c.checkFile(f)
	if err != nil {
		return nil, err
	}
	if m := c.files[id]; m != nil {
		m.users++
		return m, nil
	}
	if err := c.share.Take(budget.Mappings, 1); err != nil {
		return nil, err
	}
	m, err := c.mapNew(f, id)
	if err != nil {
		c.share.Give(budget.Mappings, 1)
	}
	return m, err
}

// mapNew maps a file that the session has not mapped yet.
func (c *clientMemory) mapNew(f *os.File, id fileID) (*mapping, error) {
	if c.mapped+id.Size > c.limits.SessionArena {
		return nil, faultf(proto.Code_CODE_LIMIT, "memfd", "%d bytes more, the session has mapped %d of at most %d",
			id.Size, c.mapped, c.limits.SessionArena)
	}
	if total := c.total.Add(id.Size); total > c.limits.ArenaBytes {
		c.total.Add(-id.Size)
		return nil, faultf(proto.Code_CODE_LIMIT, "memfd", "%d bytes more, all sessions have mapped %d of at most %d",
			id.Size, total-id.Size, c.limits.ArenaBytes)
	}
	data, err := c.mapPages(f, id.Size)
	if err != nil {
		c.total.Add(-id.Size)
		return nil, err
	}
	m := &mapping{file: id, data: data, users: 1}
	c.files[id] = m
	c.mapped += id.Size
	return m, nil
}

// mapPages maps a file with protection against missing pages. If the kernel lacks the protection, only clients of the operator
// may share memory: they could bring the host down in other ways, too.
func (c *clientMemory) mapPages(f *os.File, size int64) ([]byte, error) {
	data, err := mapFile(f, size)
	if err != nil {
		return nil, invalid("memfd", "cannot be mapped for reading and writing: %v", err)
	}
	if err := c.protect(data); err != nil {
		const advice = "allow kvhost the system call userfaultfd"
		if !c.trusted {
			_ = unix.Munmap(data) // cannot fail: the memory has just been mapped
			return nil, faultf(proto.Code_CODE_DENIED, "memfd", "the host would be charged for pages of user %d: %v: %s, or run the "+
				"client as the host's user", c.uid, err, advice)
		}
		c.log.Warn("host is charged for pages that this client takes out of its memory", "error", err, "advice", advice)
	}
	return data, nil
}

// unmapFile removes a user of a mapping and unmaps it after the last. The caller must ensure that nothing touches the bytes.
func (c *clientMemory) unmapFile(m *mapping) {
	if m.users--; m.users > 0 {
		return
	}
	delete(c.files, m.file)
	c.mapped -= m.file.Size
	c.total.Add(-m.file.Size)
	c.share.Give(budget.Mappings, 1)
	if err := unix.Munmap(m.data); err != nil {
		c.log.Error("cannot unmap client memory", "error", err)
	}
	m.data = nil
}

// setDevice records the GPU that HELLO names.
func (c *clientMemory) setDevice(uuid string) {
	c.device = uuid
	if u, err := gds.ParseUUID(uuid); err == nil {
		c.device = u.String()
	}
	for _, g := range c.gpus {
		if g.UUID.String() == c.device {
			c.gpu = g
		}
	}
}

// noGPU returns an error that explains why memory of a GPU cannot be registered.
func (c *clientMemory) noGPU(field string) error {
	if c.device == "" {
		return faultf(proto.Code_CODE_UNKNOWN, field, "memory of a GPU, and HELLO named none (device_uuid)")
	}
	var have []string
	for _, g := range c.gpus {
		have = append(have, g.UUID.String())
	}
	if len(have) == 0 {
		return faultf(proto.Code_CODE_UNKNOWN, field, "memory of %s, and this host uses no GPU", c.device)
	}
	return faultf(proto.Code_CODE_UNKNOWN, field, "memory of %s, this host has %s", c.device, strings.Join(have, ", "))
}

// importHandle returns the imported allocation of a handle. If known does not have it, importHandle imports it and adds it to
// known and to r.
func (c *clientMemory) importHandle(
	field string, handle []byte, known map[string]*gds.Import, r *registration,
) (*gds.Import, error) {
	if mem := known[string(handle)]; mem != nil {
		return mem, nil
	}
	mem, err := c.gpu.ImportIPC(handle)
	if err != nil {
		return nil, invalid(field, "%v", err)
	}
	known[string(handle)] = mem
	r.imports = append(r.imports, mem)
	return mem, nil
}
