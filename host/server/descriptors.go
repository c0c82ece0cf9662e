package server

import (
	"container/list"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvhost/kvhost/host/proto"
	"github.com/kvhost/kvhost/host/server/socket"
)

const (
	descriptorTimeout = 5 * time.Second // for one descriptor to arrive after its connection, or the one before
	descriptorConns   = 64              // open at a time
)

// descriptorConnections are the open connections of the descriptor socket, the one that has been silent longest first. A
// client sends its descriptor as soon as it is connected. So when there are too many connections the first one is closed:
// those that send nothing cannot keep others out.
type descriptorConnections struct {
	mu   sync.Mutex
	list list.List // of *net.UnixConn
}

// add enters a connection, and closes the first one if there are too many.
func (d *descriptorConnections) add(c *net.UnixConn) *list.Element {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.list.Len() >= descriptorConns {
		d.list.Remove(d.list.Front()).(*net.UnixConn).Close()
	}
	return d.list.PushBack(c)
}

// heard notes that a connection is not silent.
func (d *descriptorConnections) heard(e *list.Element) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.list.MoveToBack(e) // no effect if it was removed
}

func (d *descriptorConnections) remove(e *list.Element) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.list.Remove(e)
}

// serveDescriptors accepts connections on the descriptor socket until it is closed, and waits for their end.
func (s *Server) serveDescriptors(l *socket.Listener) {
	var work sync.WaitGroup
	defer work.Wait()
	var open descriptorConnections
	for {
		c, err := l.AcceptPeer()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil { // out of descriptors, most likely
			s.cfg.Log.Error("cannot accept on the descriptor socket", "error", err)
			time.Sleep(10 * time.Millisecond)
			continue
		}
		e := open.add(c)
		work.Go(func() {
			defer open.remove(e)
			defer c.Close()
			s.serveDescriptorConn(c, func() { open.heard(e) })
		})
	}
}

// serveDescriptorConn takes descriptors from one connection, and calls heard after each.
func (s *Server) serveDescriptorConn(c *net.UnixConn, heard func()) {
	for {
		c.SetDeadline(time.Now().Add(descriptorTimeout))
		err := s.takeOne(c)
		if errors.Is(err, io.EOF) || errors.Is(err, net.ErrClosed) {
			return
		}
		heard()
		var answer []byte
		if err != nil {
			text := err.Error()
			text = text[:min(len(text), proto.DescriptorMaxText)]
			answer = binary.LittleEndian.AppendUint32(answer, uint32(len(text)))
			answer = append(answer, text...)
		} else {
			answer = make([]byte, 4)
		}
		if _, werr := c.Write(answer); werr != nil || err != nil {
			return // after a refusal the stream's framing is not reliable
		}
	}
}

// takeOne receives one message with one descriptor and gives it to its session.
func (s *Server) takeOne(c *net.UnixConn) error {
	files, body, err := receive(c)
	defer func() {
		for _, f := range files {
			if f != nil {
				f.Close()
			}
		}
	}()
	if err != nil {
		return err
	}
	nonce, tag, err := proto.ParseDescriptor(body)
	if err != nil {
		return err
	}
	x := s.byNonce(nonce)
	if x == nil {
		return errors.New("the nonce names no session")
	}
	if len(files) != 1 {
		return fmt.Errorf("%d descriptors came, want exactly 1", len(files))
	}
	// With a GPU the descriptor may be of its memory, which only REGISTER can tell. REGISTER checks again in any case.
	if x.memory.gpu == nil {
		if _, err := x.memory.checkFile(files[0]); err != nil {
			return err
		}
	}
	if err := x.memory.giveDescriptor(tag, files[0]); err != nil {
		return err
	}
	files[0] = nil // the session's now
	return nil
}

// receive reads one whole message and the descriptors attached to any part of it.
func receive(c *net.UnixConn) (files []*os.File, body []byte, err error) {
	body = make([]byte, proto.DescriptorBytes)
	oob := make([]byte, unix.CmsgSpace(8*4))
	for got := 0; got < len(body); {
		n, oobn, flags, _, err := c.ReadMsgUnix(body[got:], oob)
		files = append(files, parseRights(oob[:oobn])...)
		switch {
		case errors.Is(err, io.EOF) && got > 0:
			return files, nil, io.ErrUnexpectedEOF
		case err != nil:
			return files, nil, err
		case flags&unix.MSG_CTRUNC != 0:
			return files, nil, errors.New("too many descriptors came at once")
		}
		got += n
	}
	return files, body, nil
}

func parseRights(oob []byte) (files []*os.File) {
	list, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return nil
	}
	for i := range list {
		fds, err := unix.ParseUnixRights(&list[i])
		if err != nil {
			continue
		}
		for _, fd := range fds {
			files = append(files, os.NewFile(uintptr(fd), "client memory"))
		}
	}
	return files
}

// descriptors are the files that a message has used up, by tag.
type descriptors map[uint64]*os.File

func (d descriptors) close() {
	for _, f := range d {
		f.Close()
	}
}

// giveDescriptor keeps a descriptor until a message names its tag.
func (c *clientMemory) giveDescriptor(tag uint64, f *os.File) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.closed:
		return ErrClosing
	case c.descriptors[tag] != nil:
		return fmt.Errorf("tag %d is taken", tag)
	case len(c.descriptors) >= c.limits.Descriptors:
		return fmt.Errorf("%d descriptors wait for a REGISTER already", len(c.descriptors))
	}
	c.descriptors[tag] = f
	return nil
}

// takeDescriptor hands a descriptor out, once.
func (c *clientMemory) takeDescriptor(tag uint64) *os.File {
	c.mu.Lock()
	defer c.mu.Unlock()
	f := c.descriptors[tag]
	delete(c.descriptors, tag)
	return f
}

// takeDescriptors takes the descriptors that regions name, as far as they came.
func (c *clientMemory) takeDescriptors(regions []*proto.Region) descriptors {
	files := descriptors{}
	take := func(tag uint64) {
		if files[tag] == nil {
			if f := c.takeDescriptor(tag); f != nil {
				files[tag] = f
			}
		}
	}
	for _, r := range regions {
		switch h := r.GetHandle().(type) {
		case *proto.Region_Memfd:
			take(h.Memfd)
		case *proto.Region_CudaVmm:
			for _, s := range h.CudaVmm.GetSegments() {
				take(s.GetTag())
			}
		}
	}
	return files
}

// closeDescriptors closes the descriptors that no message has named, and refuses others.
func (c *clientMemory) closeDescriptors() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.closed = true
	for _, f := range c.descriptors {
		f.Close()
	}
	c.descriptors = nil
}
