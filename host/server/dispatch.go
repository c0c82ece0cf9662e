package server

import (
	"strconv"

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
	case *proto.ClientMessage_Flush:
		err = x.flush(m.Id, b.Flush)
	case *proto.ClientMessage_Store, *proto.ClientMessage_Load:
		if _, err = x.newJob(m.Id); err == nil {
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

// order handles a message at once when nothing is before it and it will not wait for storage, and queues it otherwise.
func (x *session) order(m *proto.ClientMessage) error {
	_, slow := m.Body.(*proto.ClientMessage_Store)
	if !slow && x.waiting.Load() == 0 {
		x.inTurn(m)
		return nil
	}
	x.waiting.Add(1)
	select {
	case x.backlog <- m:
		return nil
	default:
		x.waiting.Add(-1)
		x.dropJob(m.Id)
		return faultf(proto.Code_CODE_LIMIT, "", "%d messages wait for their turn already", cap(x.backlog))
	}
}

// inTurn handles one message while no other is.
func (x *session) inTurn(m *proto.ClientMessage) {
	x.turn.Lock()
	defer x.turn.Unlock()
	if x.over || x.ctx.Err() != nil {
		return
	}
	hello, isHello := m.Body.(*proto.ClientMessage_Hello)
	if isHello != !x.greeted {
		x.outOfPlace(m.Id, isHello)
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
		err = x.store(m.Id, b.Store)
	case *proto.ClientMessage_Load:
		err = x.load(m.Id, b.Load)
	}
	if err != nil {
		x.dropJob(m.Id)
		x.fail(m.Id, err)
	}
}

// outOfPlace refuses a second HELLO, and anything before the first.
func (x *session) outOfPlace(id uint64, hello bool) {
	x.dropJob(id)
	if hello {
		x.fail(id, invalid("hello", "the session has said HELLO already"))
		return
	}
	x.fail(id, invalid("body", "a session's first message is HELLO"))
	x.end(errRefused)
}

// dropJob takes a job off the table that was refused before anything of it began.
func (x *session) dropJob(id uint64) {
	x.mu.Lock()
	j := x.jobs[id]
	x.mu.Unlock()
	if j != nil {
		j.neverRun()
		j.finish()
	}
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
