package server

import (
	"encoding/binary"
	"errors"
	"io"
	"math"
	"net"
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/client"
	"github.com/kvhost/kvhost/host/internal/proto"
	"github.com/kvhost/kvhost/host/internal/server/socket"
	"github.com/kvhost/kvhost/host/internal/store"
	"github.com/kvhost/kvhost/host/kv"
)

// memfd makes one with the given seals.
func memfd(t *testing.T, size int64, seals int) *os.File {
	t.Helper()
	f, err := memfdOf(size, seals)
	testenv.OK(t, err)
	t.Cleanup(func() { f.Close() })
	return f
}

func memfdOf(size int64, seals int) (*os.File, error) {
	fd, err := unix.MemfdCreate("abuse", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return nil, err
	}
	f := os.NewFile(uintptr(fd), "abuse")
	if err = f.Truncate(size); err == nil && size > 0 {
		err = unix.Fallocate(int(f.Fd()), 0, 0, size)
	}
	if err == nil {
		_, err = unix.FcntlInt(f.Fd(), unix.F_ADD_SEALS, seals)
	}
	if err != nil {
		f.Close()
	}
	return f, err
}

// pass sends a message with files on the descriptor socket and gives the host's refusal, empty when it took them.
func (r *rig) pass(body []byte, files ...*os.File) (string, error) {
	c, err := net.Dial("unix", r.socket+proto.DescriptorSuffix)
	if err != nil {
		return "", err
	}
	defer c.Close()
	var fds []int
	for _, f := range files {
		fds = append(fds, int(f.Fd()))
	}
	var rights []byte
	if len(fds) > 0 {
		rights = unix.UnixRights(fds...)
	}
	if _, _, err := c.(*net.UnixConn).WriteMsgUnix(body, rights, nil); err != nil {
		return "", err
	}
	c.(*net.UnixConn).CloseWrite()
	var head [4]byte
	if _, err := io.ReadFull(c, head[:]); err != nil {
		return "", err
	}
	text, err := io.ReadAll(io.LimitReader(c, int64(binary.LittleEndian.Uint32(head[:]))))
	return string(text), err
}

// open counts this process' descriptors.
func open(t *testing.T) int {
	list, err := os.ReadDir("/proc/self/fd")
	testenv.OK(t, err)
	return len(list)
}

func TestDescriptorAbuse(t *testing.T) {
	r := newRig(t, func(c *Config, _ *store.Config) { c.Limits.Descriptors = 3 })
	w := r.raw()
	nonce := w.say(greeting("e")).GetHello().GetNonce()
	good := memfd(t, 1<<20, unix.F_SEAL_SHRINK)
	unsealed := memfd(t, 1<<20, unix.F_SEAL_GROW)
	empty := memfd(t, 0, unix.F_SEAL_SHRINK)
	plain, err := os.Create(r.dir + "/plain")
	testenv.OK(t, err)
	defer plain.Close()
	null, err := os.Open(os.DevNull)
	testenv.OK(t, err)
	defer null.Close()
	before := open(t)
	msg := func(tag uint64) []byte { return proto.AppendDescriptor(nil, nonce, tag) }
	for name, c := range map[string]struct {
		body  []byte
		files []*os.File
		says  string
	}{
		"unsealed":    {msg(1), []*os.File{unsealed}, "F_SEAL_SHRINK"},
		"empty":       {msg(1), []*os.File{empty}, "empty"},
		"plain file":  {msg(1), []*os.File{plain}, "memfd"},
		"device":      {msg(1), []*os.File{null}, "memfd"},
		"none":        {msg(1), nil, "0 descriptors"},
		"two":         {msg(1), []*os.File{good, good}, "2 descriptors"},
		"many":        {msg(1), []*os.File{good, good, good, good, good, good, good, good, good, good, good}, "too many"},
		"wrong nonce": {proto.AppendDescriptor(nil, make([]byte, proto.NonceBytes), 1), []*os.File{good}, "no session"},
		"short":       {msg(1)[:20], []*os.File{good}, "EOF"},
	} {
		text, err := r.pass(c.body, c.files...)
		if err != nil || !strings.Contains(text, c.says) {
			t.Errorf("descriptor with %s: got answer %q, %v", name, text, err)
		}
	}
	until(t, "refused descriptors are closed", func() bool { return open(t) <= before })
	for tag := range uint64(3) {
		if text, err := r.pass(msg(tag), good); text != "" || err != nil {
			t.Fatalf("good: %q, %v", text, err)
		}
	}
	if text, _ := r.pass(msg(2), good); !strings.Contains(text, "taken") {
		t.Errorf("tag again: %q", text)
	}
	if text, _ := r.pass(msg(9), good); !strings.Contains(text, "wait for a REGISTER") {
		t.Errorf("too many: %q", text)
	}
	for name, fd := range map[string]uint64{"unknown tag": 77, "writable no more": 1} {
		if name == "writable no more" { // sealed between its arrival and its use
			if _, err := unix.FcntlInt(good.Fd(), unix.F_ADD_SEALS, unix.F_SEAL_WRITE); err != nil {
				t.Fatal(err)
			}
		}
		reg := &proto.Register{}
		for pl := range uint32(planes) {
			reg.Regions = append(reg.Regions, &proto.Region{Plane: pl, Handle: &proto.Region_Memfd{Memfd: fd},
				Stride: pageBytes, Blocks: 1})
		}
		a := w.say(&proto.SessionRequest{Body: &proto.SessionRequest_Register{Register: reg}})
		if f := a.GetError().GetField(); !strings.Contains(f, "memfd") {
			t.Errorf("register with %s: got %v, want an error about memfd", name, a)
		}
	}
	w.conn.Close()
	until(t, "the session's descriptors are closed", func() bool { return r.server.Stats().Sessions == 0 && open(t) <= before })
	if text, _ := r.pass(msg(1), good); !strings.Contains(text, "no session") {
		t.Errorf("after the end: %q", text)
	}
}

func TestRegionsLieWithinTheirFile(t *testing.T) {
	r := newRig(t, nil)
	p := r.dial(nil)
	for _, reg := range p.regs {
		testenv.OK(t, reg.Unregister(t.Context()))
	}
	size := int64(len(p.arena.Bytes()))
	ok := client.PlaneRegion{Stride: pageBytes, Blocks: 4}
	with := func(change func(*client.PlaneRegion)) []client.PlaneRegion {
		bad := ok
		change(&bad)
		return []client.PlaneRegion{ok, ok, bad, ok}
	}
	all := func(change func(*client.PlaneRegion)) []client.PlaneRegion {
		bad := ok
		change(&bad)
		return []client.PlaneRegion{bad, bad, bad, bad}
	}
	for name, c := range map[string]struct {
		group  uint32
		planes []client.PlaneRegion
		field  string
	}{
		"group":            {9, []client.PlaneRegion{ok}, "group"},
		"few planes":       {0, []client.PlaneRegion{ok}, "regions"},
		"many planes":      {0, []client.PlaneRegion{ok, ok, ok, ok, ok}, "regions"},
		"no blocks":        {0, with(func(p *client.PlaneRegion) { p.Blocks = 0 }), "regions[2].blocks"},
		"other blocks":     {0, with(func(p *client.PlaneRegion) { p.Blocks = 5 }), "regions[2].blocks"},
		"small stride":     {0, with(func(p *client.PlaneRegion) { p.Stride = pageBytes - 1 }), "regions[2].stride"},
		"huge stride":      {0, with(func(p *client.PlaneRegion) { p.Stride = math.MaxInt64 }), "regions[2].stride"},
		"offset":           {0, with(func(p *client.PlaneRegion) { p.Offset = size + 1 }), "regions[2].offset"},
		"huge offset":      {0, with(func(p *client.PlaneRegion) { p.Offset = math.MaxInt64 }), "regions[2].offset"},
		"last page":        {0, with(func(p *client.PlaneRegion) { p.Offset = size - 4*pageBytes + 1 }), "regions[2].blocks"},
		"no page":          {0, with(func(p *client.PlaneRegion) { p.Offset = size }), "regions[2].blocks"},
		"blocks":           {0, with(func(p *client.PlaneRegion) { p.Blocks = math.MaxUint32 - 1 }), "regions[2].blocks"},
		"the most":         {0, with(func(p *client.PlaneRegion) { p.Blocks = math.MaxUint32 }), "regions[2].blocks"},
		"overflow":         {0, with(func(p *client.PlaneRegion) { p.Stride, p.Blocks = size, math.MaxUint32-1 }), "regions[2].blocks"},
		"one too far":      {0, with(func(p *client.PlaneRegion) { p.Stride = size/3 - 1; p.Offset = pageBytes }), "regions[2].blocks"},
		"group 5, too few": {5, nil, "regions"},
		"pages overlap":    {0, with(func(p *client.PlaneRegion) { p.Pages, p.PageStride = 2, pageBytes-1 }), "regions[2].page_stride"},
		"far pages":        {0, with(func(p *client.PlaneRegion) { p.Pages, p.PageStride = 2, size+1 }), "regions[2].page_stride"},
		"many pages":       {0, with(func(p *client.PlaneRegion) { p.Pages, p.PageStride = 1<<31, pageBytes }), "regions[2].page_stride"},
		"wide pages":       {0, with(func(p *client.PlaneRegion) { p.Pages, p.PageStride = kv.MaxBlocks, size }), "regions[2].page_stride"},
		"blocks overlap":   {0, with(func(p *client.PlaneRegion) { p.Pages, p.PageStride = 2, pageBytes }), "regions[2].stride"},
		"other pages": {0, with(func(p *client.PlaneRegion) { p.Pages, p.PageStride, p.Stride = 2, pageBytes, 2*pageBytes }),
			"regions[2].pages"},
		"pages that do not divide": {0, all(func(p *client.PlaneRegion) { p.Pages, p.PageStride, p.Stride = 3, pageBytes, 3*pageBytes }), "regions"},
		"last page of a block": {0, all(func(p *client.PlaneRegion) {
			p.Pages, p.PageStride, p.Stride, p.Offset = 2, pageBytes, 2*pageBytes, size-8*pageBytes+1
		}), "regions[0].blocks"},
	} {
		_, err := p.Register(t.Context(), c.group, p.arena, c.planes)
		var refused *client.HostError
		if !errors.As(err, &refused) || refused.Field != c.field {
			t.Errorf("register with %s: got %v", name, err)
		}
	}
	if n := r.server.Stats().ArenaBytes; n != 0 {
		t.Fatalf("refused registrations keep %d bytes mapped", n)
	}
	last := client.PlaneRegion{Offset: size - 4*pageBytes, Stride: pageBytes, Blocks: 4}
	if _, err := p.Register(t.Context(), 0, p.arena, []client.PlaneRegion{last, last, last, last}); err != nil {
		t.Fatal(err)
	}
	if _, err := p.Register(t.Context(), 0, p.arena, []client.PlaneRegion{ok, ok, ok, ok}); !errors.Is(err,
		client.ErrBusy) {
		t.Errorf("twice: %v", err)
	}
	if _, err := p.Register(t.Context(), 5, p.arena, []client.PlaneRegion{ok, ok, ok, ok}); err != nil {
		t.Error(err)
	}
	if n := r.server.Stats().ArenaBytes; n != size {
		t.Errorf("one file for two groups is mapped as %d bytes, it has %d", n, size)
	}
	testenv.OK(t, p.arena.Close())
	if _, err := p.Register(t.Context(), 0, p.arena, nil); !errors.Is(err, client.ErrArena) {
		t.Errorf("closed arena: %v", err)
	}
}

// Engines that start together bring their descriptors together: no connection is closed to make room for another's.
func TestEnginesStartTogether(t *testing.T) {
	r := newRig(t, nil)
	var limit unix.Rlimit
	testenv.OK(t, unix.Getrlimit(unix.RLIMIT_NOFILE, &limit))
	together := int(min(200, limit.Cur/100))
	var first net.Conn
	for n := range together - 1 { // the last one is that of pass
		c, err := net.Dial("unix", r.socket+proto.DescriptorSuffix)
		testenv.OK(t, err)
		defer c.Close()
		if n == 0 {
			first = c
		}
	}
	if text, err := r.pass(make([]byte, proto.DescriptorBytes)); text == "" || err != nil { // all others were accepted before
		t.Fatalf("a message without a descriptor: refusal %q, error %v, want a refusal", text, err)
	}
	first.SetReadDeadline(time.Now().Add(50 * time.Millisecond)) // one that is closed says so at once
	if _, err := first.Read(make([]byte, 1)); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("the first of %d connections: error %v, want it open, and silent", together, err)
	}
}

// Connections that send nothing do not keep another client's descriptor out, however many there are.
func TestSilentConnectionsDelayNobody(t *testing.T) {
	r := newRig(t, nil)
	w := r.raw()
	nonce := w.say(greeting("e")).GetHello().GetNonce()
	var silent []net.Conn
	for range 3 * r.server.budgets.Passing.Max {
		c, err := net.Dial("unix", r.socket+proto.DescriptorSuffix)
		testenv.OK(t, err)
		defer c.Close()
		silent = append(silent, c)
	}
	began := time.Now()
	text, err := r.pass(proto.AppendDescriptor(nil, nonce, 1), memfd(t, 1<<20, unix.F_SEAL_SHRINK))
	if text != "" || err != nil {
		t.Fatal(text, err)
	}
	// Each round of silent connections used to hold all others up until it ran into its time limit.
	if took := time.Since(began); took >= socket.DescriptorTimeout {
		t.Errorf("a descriptor took %v", took)
	}
	for i, c := range silent[:2*r.server.budgets.Passing.Max] { // the first ones made room
		if n, err := c.Read(make([]byte, 1)); n != 0 || err == nil {
			t.Errorf("connection %d is open: %d, %v", i, n, err)
		}
	}
}
