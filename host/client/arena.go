package client

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvhost/kvhost/host/internal/proto"
)

// Arena is memory that this process shares with the host.
type Arena struct {
	file *os.File
	data []byte

	mu sync.Mutex // held while the descriptor is sent or the arena is closed
}

// NewArena creates a memfd of the given size, allocates its pages, seals its size, and maps it. The host maps it when it is
// registered.
func (s *Session) NewArena(bytes int64) (*Arena, error) { return NewArena(bytes) }

// NewArena creates an arena without a session. An arena may outlive sessions and be registered in any of them.
func NewArena(bytes int64) (*Arena, error) {
	if bytes <= 0 || int64(int(bytes)) != bytes {
		return nil, fmt.Errorf("%w: %d bytes", ErrArena, bytes)
	}
	fd, err := unix.MemfdCreate("kvhost-arena", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return nil, fmt.Errorf("%w: memfd_create: %w", ErrArena, err)
	}
	f := os.NewFile(uintptr(fd), "kvhost-arena")
	if err = f.Truncate(bytes); err == nil {
		err = allocate(f)
	}
	if err != nil {
		f.Close()
		return nil, fmt.Errorf("%w: %w", ErrArena, err)
	}
	if _, err := unix.FcntlInt(f.Fd(), unix.F_ADD_SEALS,
		unix.F_SEAL_SHRINK|unix.F_SEAL_GROW|unix.F_SEAL_SEAL); err != nil {
		f.Close()
		return nil, fmt.Errorf("%w: seal: %w", ErrArena, err)
	}
	data, err := unix.Mmap(fd, 0, int(bytes), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		f.Close()
		return nil, fmt.Errorf("%w: mmap: %w", ErrArena, err)
	}
	return &Arena{file: f, data: data}, nil
}

// OpenArena maps an existing file of shared memory, such as POSIX shared memory, and allocates its missing pages. The arena
// owns the file. If the file is not sealed against shrinking, [Hello].UnsealedMemory must be set.
func OpenArena(f *os.File) (*Arena, error) {
	info, err := f.Stat()
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrArena, err)
	}
	if err := allocate(f); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrArena, err)
	}
	data, err := unix.Mmap(int(f.Fd()), 0, int(info.Size()), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("%w: mmap %s: %w", ErrArena, f.Name(), err)
	}
	return &Arena{file: f, data: data}, nil
}

// allocate allocates the missing pages of a file, so that they are charged to this process. A host refuses a file with missing
// pages, because it would be charged for the pages that it touches first.
func allocate(f *os.File) error {
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return fmt.Errorf("fstat %s: %w", f.Name(), err)
	}
	if st.Size <= 512*st.Blocks {
		return nil
	}
	for at := int64(0); at < st.Size; {
		n := min(allocatePart, st.Size-at)
		switch err := unix.Fallocate(int(f.Fd()), 0, at, n); {
		case err == nil:
			at += n
		case !errors.Is(err, unix.EINTR): // a signal may undo a part
			return fmt.Errorf("fallocate %d bytes of %s: %w", st.Size, f.Name(), err)
		}
	}
	return nil
}

// allocatePart is the number of bytes that one system call allocates.
const allocatePart = 64 << 20

// Bytes returns the memory. It must not be used after Close.
func (a *Arena) Bytes() []byte { return a.data }

// Close unmaps the memory in this process. A host keeps its own mapping until the arena is unregistered.
func (a *Arena) Close() error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.data == nil {
		return nil
	}
	err := errors.Join(unix.Munmap(a.data), a.file.Close())
	a.data = nil
	return err
}

// PlaneRegion is the place of one plane's pages in an arena. Block b's page is at Offset + b*Stride. If a block of the engine has several
// pages of the group, page i of block b is at Offset + b*Stride + i*PageStride, and stores and loads name the engine's blocks.
type PlaneRegion struct {
	Offset, Stride int64
	Blocks         uint32
	Pages          uint32 // pages of a block, the same for all planes; 0 means 1
	PageStride     int64  // distance between the pages of a block
}

// Registration is the pages of a group that are registered with the host.
type Registration struct {
	session *Session
	group   uint32
}

// Register registers a group's pages, with one region for each plane of the group in the order of its geometry. With several
// units (see [kv.Namespace]), the regions of the rank's first unit come first, then those of the next.
func (s *Session) Register(ctx context.Context, group uint32, arena *Arena,
	planes []PlaneRegion) (*Registration, error) {
	tag, err := s.pass(ctx, arena)
	if err != nil {
		return nil, err
	}
	return s.register(ctx, group, planes,
		func(int) *proto.Region { return &proto.Region{Handle: &proto.Region_Memfd{Memfd: tag}} })
}

func (s *Session) register(ctx context.Context, group uint32, planes []PlaneRegion,
	region func(int) *proto.Region) (*Registration, error) {
	m, each := &proto.Register{Group: group}, max(1, len(planes))
	if g, ok := s.hello.Namespace.Group(group); ok {
		each = len(g.Geometry.Planes)
	}
	for i, p := range planes {
		if p.Offset < 0 || p.Stride < 0 || p.PageStride < 0 {
			return nil, fmt.Errorf("%w: plane %d: offset %d, strides %d and %d", ErrArena, i, p.Offset, p.Stride, p.PageStride)
		}
		r := region(i)
		r.Unit, r.Plane, r.Offset, r.Stride, r.Blocks = uint32(i/each), uint32(i%each), uint64(p.Offset), uint64(p.Stride), p.Blocks
		r.Pages, r.PageStride = p.Pages, uint64(p.PageStride)
		m.Regions = append(m.Regions, r)
	}
	if _, err := s.ask(ctx, &proto.SessionRequest{Body: &proto.SessionRequest_Register{Register: m}}); err != nil {
		return nil, err
	}
	return &Registration{s, group}, nil
}

// Unregister waits for the jobs that use the pages, and returns when the host can no longer touch the pages.
func (r *Registration) Unregister(ctx context.Context) error {
	_, err := r.session.ask(ctx,
		&proto.SessionRequest{Body: &proto.SessionRequest_Unregister{Unregister: &proto.Unregister{Group: r.group}}})
	return err
}

// pass sends the arena's descriptor to the host and returns its tag, which is valid for one REGISTER.
func (s *Session) pass(ctx context.Context, a *Arena) (uint64, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.data == nil {
		return 0, fmt.Errorf("%w: closed", ErrArena)
	}
	return s.passFile(ctx, a.file)
}

func (s *Session) passFile(ctx context.Context, f *os.File) (uint64, error) {
	if err := s.Err(); err != nil {
		return 0, err
	}
	s.mu.Lock()
	s.tag++
	tag := s.tag
	s.mu.Unlock()
	c, err := s.hello.dial(ctx, s.descriptors)
	if err != nil {
		return 0, errors.Join(ctx.Err(), fmt.Errorf("%w: descriptor socket: %w", ErrHostGone, err))
	}
	defer c.Close()
	defer context.AfterFunc(ctx, func() { c.SetDeadline(time.Unix(1, 0)) })()
	msg := proto.AppendDescriptor(nil, s.nonce, tag)
	_, _, err = c.WriteMsgUnix(msg, unix.UnixRights(int(f.Fd())), nil)
	if err == nil {
		err = readVerdict(c)
	}
	if ctx.Err() != nil {
		return 0, ctx.Err()
	}
	return tag, err
}

// readVerdict reads the host's answer to a descriptor: 0 for success, or otherwise the length of an error text.
func readVerdict(r io.Reader) error {
	var head [4]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return fmt.Errorf("%w: descriptor socket: %w", ErrHostGone, err)
	}
	n := binary.LittleEndian.Uint32(head[:])
	if n == 0 {
		return nil
	}
	text := make([]byte, min(n, proto.DescriptorMaxText))
	if _, err := io.ReadFull(r, text); err != nil {
		return fmt.Errorf("%w: descriptor socket: %w", ErrHostGone, err)
	}
	return fmt.Errorf("%w: host: %s", ErrArena, text)
}
