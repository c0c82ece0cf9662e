package socket

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"strconv"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvhost/kvhost/host/internal/budget"
	"github.com/kvhost/kvhost/host/internal/proto"
)

// DescriptorTimeout is the longest time for a descriptor to arrive, after the connection or after the previous descriptor.
const DescriptorTimeout = 5 * time.Second

// mostRights is the maximum number of descriptors that are accepted from a message. A valid message has one.
const mostRights = budget.DescriptorFiles - 1

// Descriptors serves the descriptor socket. It passes each received descriptor to its session.
type Descriptors struct {
	// Give takes ownership of a descriptor unless it returns an error.
	Give func(p Peer, nonce [proto.NonceBytes]byte, tag uint64, f *os.File) error
	Log  *slog.Logger
	Open *budget.Connections
}

// Serve accepts connections until the listener is closed, and waits for their end.
func (d *Descriptors) Serve(l *Listener) {
	var work sync.WaitGroup
	defer work.Wait()
	for {
		c, p, err := l.AcceptPeer()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil { // most likely the process has run out of descriptors
			d.Log.Error("cannot accept on the descriptor socket", "error", err)
			time.Sleep(10 * time.Millisecond)
			continue
		}
		e := d.Open.Add(c, strconv.Itoa(int(p.PID)))
		work.Go(func() {
			defer d.Open.Remove(e)
			defer c.Close()
			d.serve(c, p, func() { d.Open.Heard(e) })
		})
	}
}

// serve receives descriptors from a connection. It calls heard after each.
func (d *Descriptors) serve(c *net.UnixConn, p Peer, heard func()) {
	for {
		c.SetDeadline(time.Now().Add(DescriptorTimeout))
		err := d.takeOne(c, p)
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
			return // after a refusal the framing of the stream is unreliable
		}
	}
}

// takeOne receives one message with one descriptor and passes it to its session.
func (d *Descriptors) takeOne(c *net.UnixConn, p Peer) error {
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
	if len(files) != 1 {
		return fmt.Errorf("%d descriptors came, want exactly 1", len(files))
	}
	if err := d.Give(p, nonce, tag, files[0]); err != nil {
		return err
	}
	files[0] = nil // owned by the session now
	return nil
}

// receive reads one whole message and the descriptors that are attached to any part of it.
func receive(c *net.UnixConn) (files []*os.File, body []byte, err error) {
	body = make([]byte, proto.DescriptorBytes)
	oob := make([]byte, unix.CmsgSpace(mostRights*4))
	for got := 0; got < len(body); {
		n, oobn, flags, _, err := c.ReadMsgUnix(body[got:], oob)
		files = append(files, parseRights(oob[:oobn])...)
		switch {
		case errors.Is(err, io.EOF) && got > 0:
			return files, nil, io.ErrUnexpectedEOF
		case err != nil:
			return files, nil, err
		case flags&unix.MSG_CTRUNC != 0, len(files) > mostRights:
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
