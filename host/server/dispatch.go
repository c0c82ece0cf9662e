package server

import (
	"strconv"

	protobuf "google.golang.org/protobuf/proto"

	"github.com/kvhost/kvhost/host/chunk"
	"github.com/kvhost/kvhost/host/proto"
)

// receive takes one message from the reader. What need not keep its order is handled here, the rest in turn.
func (x *session) receive(m *proto.ClientMessage) {
	if m.GetId() <= x.lastID {
		x.fail(m.GetId(), invalid("id", "%d does not follow %d", m.GetId(), x.lastID))
		return
	}
	x.lastID = m.GetId()
	var err error
	switch b := m.GetBody().(type) {
	case *proto.ClientMessage_Ping:
		x.done(m.Id)
	case *proto.ClientMessage_Cancel:
		err = x.cancelJob(m.Id, b.Cancel)
	case *proto.ClientMessage_Advance:
		err = x.advance(m.Id, b.Advance)
	case *proto.ClientMessage_Flush:
		err = x.flush(m.Id, b.Flush)
	case *proto.ClientMessage_Store:
		err = x.orderJob(m, len(b.Store.GetChunks()))
	case *proto.ClientMessage_Load:
		err = x.orderJob(m, len(b.Load.GetChunks()))
	case *proto.ClientMessage_Lookup:
		if err = x.checkKeys(len(b.Lookup.GetKeys()) / chunk.KeyBytes); err == nil {
			err = x.order(m)
		}
	case nil:
		err = invalid("body", "none that this host knows")
	default:
		err = x.order(m)
	}
	if err != nil {
		x.fail(m.Id, err)
	}
}

// orderJob enters a job and orders its message. What a message may not hold at all is refused before it waits.
func (x *session) orderJob(m *proto.ClientMessage, chunks int) error {
	if chunks > 0 { // none is wrong too, but a HELLO that is missing comes first
		if err := x.checkChunks(chunks); err != nil {
			return err
		}
	}
	j, err := x.newJob(m)
	if err != nil {
		return err
	}
	if err = x.order(m); err != nil && !x.drop(j) {
		return nil
	}
	return err
}

// order handles a message at once when nothing is before it and it will not wait for storage, and queues it otherwise.
func (x *session) order(m *proto.ClientMessage) error {
	_, slow := m.Body.(*proto.ClientMessage_Store)
	if !slow && x.waiting.Load() == 0 {
		x.inTurn(m)
		return nil
	}
	w := weigh(m)
	if have := x.weight.Load(); have > 0 && have+w > backlogBytes { // CANCEL must be heard still, so reading goes on
		return faultf(proto.Code_CODE_LIMIT, "", "messages of %d bytes wait for their turn already", have)
	}
	x.waiting.Add(1)
	x.weight.Add(w)
	select {
	case x.backlog <- m:
		return nil
	default:
		x.handled(m)
		return faultf(proto.Code_CODE_LIMIT, "", "%d messages wait for their turn already", cap(x.backlog))
	}
}

// handled counts a message that no longer waits.
func (x *session) handled(m *proto.ClientMessage) {
	x.waiting.Add(-1)
	x.weight.Add(-weigh(m))
}

// weigh estimates the memory that a message takes. An element of a list takes much more here than on the wire.
func weigh(m *proto.ClientMessage) int64 {
	const each = 128
	n := each
	switch b := m.Body.(type) {
	case *proto.ClientMessage_Store:
		for _, c := range b.Store.GetChunks() {
			n += each + len(c.GetKey()) + len(c.GetParent()) + 4*len(c.GetBlocks())
		}
	case *proto.ClientMessage_Load:
		for _, c := range b.Load.GetChunks() {
			n += each + 4*len(c.GetBlocks())
		}
	case *proto.ClientMessage_Lookup:
		n += len(b.Lookup.GetKeys())
	default:
		n += each / 2 * protobuf.Size(m) // as if it were all empty elements
	}
	return int64(n)
}

// inTurn handles one message while no other is.
func (x *session) inTurn(m *proto.ClientMessage) {
	x.turn.Lock()
	defer x.turn.Unlock()
	if x.over || x.ctx.Err() != nil {
		return
	}
	var j *job
	switch m.Body.(type) {
	case *proto.ClientMessage_Store, *proto.ClientMessage_Load:
		if j = x.job(m.Id); j == nil { // cancelled, and completed so
			x.forgo(m.GetLoad())
			return
		}
	}
	hello, isHello := m.Body.(*proto.ClientMessage_Hello)
	if isHello != !x.greeted {
		x.outOfPlace(m.Id, j, isHello)
		return
	}
	var err error
	switch b := m.Body.(type) {
	case *proto.ClientMessage_Hello:
		if err = x.hello(m.Id, hello.Hello); err != nil {
			defer x.end(errRefused)
		}
	case *proto.ClientMessage_Register:
		if err = x.register(b.Register); err == nil {
			x.done(m.Id)
		}
	case *proto.ClientMessage_Semaphores:
		if err = x.share(b.Semaphores); err == nil {
			x.done(m.Id)
		}
	case *proto.ClientMessage_Unregister:
		err = x.unregister(m.Id, b.Unregister)
	case *proto.ClientMessage_Lookup:
		err = x.lookup(m.Id, b.Lookup)
	case *proto.ClientMessage_Release:
		if err = x.release(b.Release); err == nil {
			x.done(m.Id)
		}
	case *proto.ClientMessage_EndRequest:
		x.engine.endLeases(x, b.EndRequest.GetRequest(), false)
		x.engine.endRequest(x, b.EndRequest.GetRequest())
		x.done(m.Id)
	case *proto.ClientMessage_Store:
		err = x.store(j, b.Store)
	case *proto.ClientMessage_Load:
		err = x.load(j, b.Load)
	}
	if err != nil && x.drop(j) {
		x.fail(m.Id, err)
	}
}

// outOfPlace refuses a second HELLO, and anything before the first.
func (x *session) outOfPlace(id uint64, j *job, hello bool) {
	if hello {
		x.fail(id, invalid("hello", "the session has said HELLO already"))
		return
	}
	if x.drop(j) {
		x.fail(id, invalid("body", "a session's first message is HELLO"))
	}
	x.end(errRefused)
}

// drop takes a job off the table that is refused before anything of it began; j is nil for other messages. It reports
// whether the refusal is to be answered: not when the job was cancelled, and completed so, meanwhile.
func (x *session) drop(j *job) bool {
	if j == nil {
		return true
	}
	if !j.claim() {
		return false
	}
	j.neverRun()
	j.finish()
	return true
}

// group finds a group of the session's namespace.
func (x *session) group(id uint32) (*chunk.Group, error) {
	g, ok := x.ns.Group(id)
	if !ok {
		return nil, faultf(proto.Code_CODE_UNKNOWN, "group", "the namespace has no group %d", id)
	}
	return g, nil
}

// registered finds a group's pages.
func (x *session) registered(group uint32) (*registration, error) {
	if _, err := x.group(group); err != nil {
		return nil, err
	}
	r := x.regs[group]
	switch {
	case r == nil:
		return nil, faultf(proto.Code_CODE_UNKNOWN, "group", "%d is not registered", group)
	case r.closing:
		return nil, faultf(proto.Code_CODE_BUSY, "group", "%d is being unregistered", group)
	}
	return r, nil
}

// at names an element of a repeated field: chunks[3].blocks.
func at(list string, i int, field string) string {
	s := list + "[" + strconv.Itoa(i) + "]"
	if field != "" {
		s += "." + field
	}
	return s
}
