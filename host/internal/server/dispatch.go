package server

import (
	"context"
	"math"
	"time"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/internal/proto"
	"github.com/kvhost/kvhost/host/internal/transfer"
	"github.com/kvhost/kvhost/host/kv"
)

// receive takes one message from the reader. It handles CANCEL, AWAIT_COPIES and PING at once, and submits all others to be
// handled in order.
func (x *session) receive(m *proto.SessionRequest) {
	if m.GetId() <= x.lastID {
		err := invalid("id", "%d does not follow %d", m.GetId(), x.lastID)
		// Not x.reply: the id may belong to an earlier message that is still unanswered.
		x.out.Push(outgoing{SessionResponse: x.refusal(m.GetId(), err)})
		return
	}
	x.lastID = m.GetId()
	limits := &x.cfg.Limits
	if err := x.share.Received(m); err != nil {
		x.server.budgets.Refused(x.log, err)
		x.fail(m.Id, err)
		return
	}
	var err error
	switch b := m.GetBody().(type) {
	case *proto.SessionRequest_Ping:
		x.done(m.Id)
	case *proto.SessionRequest_Cancel:
		err = x.cancelJob(m.Id, b.Cancel)
	case *proto.SessionRequest_AwaitCopies:
		err = x.awaitCopies(m.Id, b.AwaitCopies)
	case *proto.SessionRequest_Store:
		err = x.receiveJob(m, len(b.Store.GetChunks()))
	case *proto.SessionRequest_Load:
		err = x.receiveJob(m, len(b.Load.GetChunks()))
	case *proto.SessionRequest_Lookup:
		if err = limits.checkKeys(len(b.Lookup.GetKeys()) / kv.KeyBytes); err == nil {
			err = x.inbox.Submit(m)
		}
	case *proto.SessionRequest_Discard:
		if err = limits.checkKeys(len(b.Discard.GetKeys()) / kv.KeyBytes); err == nil {
			err = x.inbox.Submit(m)
		}
	case nil:
		err = invalid("body", "none that this host knows")
	default:
		err = x.inbox.Submit(m)
	}
	if err != nil {
		x.refuse(m, err)
	}
}

// receiveJob enters a job in the table and submits its message. A message over the limits is refused before it is queued.
func (x *session) receiveJob(m *proto.SessionRequest, chunks int) error {
	if chunks > 0 { // an empty job is refused later, since a missing HELLO must be reported first
		if err := x.cfg.Limits.checkChunks(chunks); err != nil {
			return err
		}
	}
	j, err := x.newJob(m)
	if err != nil {
		return err
	}
	if err = x.inbox.Submit(m); err != nil && !j.refuse() {
		return nil
	}
	return err
}

// newJob creates a job and enters it in the session's table.
func (x *session) newJob(m *proto.SessionRequest) (*job, error) {
	j := &job{id: m.GetId(), session: x, message: m, since: time.Now(), started: make(chan struct{})}
	j.abandon, j.span = x.abandon, x.server.cfg.Spans.Begin(m)
	j.ctx, j.stop = context.WithCancel(x.ctx)
	if err := x.jobs.add(j); err != nil {
		j.stop()
		return nil, err
	}
	return j, nil
}

// abandon completes a job that was cancelled before any part of it ran. All of its chunks have the result cancelled.
func (x *session) abandon(j *job) {
	switch {
	case x.ctx.Err() != nil: // the client is gone
		j.finish()
		x.share.Unanswered(j.id)
	case j.message.GetLoad() != nil:
		s := &loading{job: j, units: int(max(1, x.units)), chunks: j.message.GetLoad().GetChunks()}
		if x.engine != nil {
			_ = s.readTimeline(j.message.GetLoad()) // a bad timeline has no semaphores to write
		}
		s.failed(transfer.ErrCancelled)
	default:
		s := newStoring(j, len(j.message.GetStore().GetChunks()))
		s.timeline, _ = x.timelines.of(j.message.GetStore().GetTimeline(), 0)
		for i := range s.results {
			s.refused(i, transfer.ErrCancelled)
		}
		s.read(transfer.Outcome{})
		s.published(transfer.Outcome{})
	}
}

// handle handles one message in its turn. The inbox calls it with the turn held.
func (x *session) handle(m *proto.SessionRequest) {
	if x.ctx.Err() != nil {
		x.drop(m)
		return
	}
	var j *job
	switch m.Body.(type) {
	case *proto.SessionRequest_Store, *proto.SessionRequest_Load:
		if j = x.jobs.get(m.Id); j == nil { // cancelled, and thereby completed
			x.useUpLease(m.GetLoad())
			return
		}
	}
	hello, isHello := m.Body.(*proto.SessionRequest_Hello)
	if isHello != (x.engine == nil) {
		x.outOfPlace(m.Id, j, isHello)
		return
	}
	if isHello {
		if err := x.hello(m.Id, hello.Hello); err != nil {
			x.fail(m.Id, err)
			x.end(errRefused)
		}
		return
	}
	if err := x.handleGreeted(j, m); err != nil && j.refuse() {
		x.refuse(m, err)
	}
}

// drop discards a message after the session has ended. Jobs are left to the teardown, which cancels them.
func (x *session) drop(m *proto.SessionRequest) {
	switch m.Body.(type) {
	case *proto.SessionRequest_Store, *proto.SessionRequest_Load:
	default:
		x.share.Unanswered(m.Id)
	}
}

// handleGreeted handles a message after HELLO. j is the job of a STORE or LOAD, nil for other messages.
func (x *session) handleGreeted(j *job, m *proto.SessionRequest) error {
	switch b := m.Body.(type) {
	case *proto.SessionRequest_Register:
		err := x.memory.register(x.ns, int(x.units), b.Register)
		if err == nil { // lets lookups by other ranks estimate the load time of this rank
			x.engine.mu.Lock()
			x.engine.queues[x.rank-x.engine.facts.firstRank] = x.queue
			x.engine.mu.Unlock()
		}
		return x.doneUnless(m.Id, err)
	case *proto.SessionRequest_Semaphores:
		return x.doneUnless(m.Id, x.timelines.share(b.Semaphores))
	case *proto.SessionRequest_Withdrawals:
		return x.doneUnless(m.Id, x.memory.shareWithdrawals(b.Withdrawals))
	case *proto.SessionRequest_Unregister:
		return x.unregister(m.Id, b.Unregister)
	case *proto.SessionRequest_Lookup:
		return x.lookup(m)
	case *proto.SessionRequest_Release:
		return x.doneUnless(m.Id, x.release(b.Release))
	case *proto.SessionRequest_Discard:
		return x.discard(m)
	case *proto.SessionRequest_EndRequest:
		x.endAsking(b.EndRequest.GetRequest())
		x.engine.endLeases(x.granted, b.EndRequest.GetRequest(), false)
		end := x.engine.endRequest(x.granted, b.EndRequest.GetRequest(), hintsOf(b.EndRequest))
		// Policies should see the end after the request's stores, so it is queued behind them, unless the queue is long.
		if n := x.reserving.Len(); n > 0 && n < x.cfg.Limits.Jobs {
			x.reserving.Add(m.Id, end)
		} else {
			end()
		}
		x.done(m.Id)
	case *proto.SessionRequest_Store:
		return x.store(j, b.Store)
	case *proto.SessionRequest_Load:
		return x.load(j, b.Load)
	}
	return nil
}

// hintsOf reads the hints of an END_REQUEST. The reasons have the same numbers in the wire protocol and in the policy contract.
func hintsOf(m *proto.EndRequest) abi.Hints {
	reason := m.GetReason()
	if reason < 0 || reason > proto.EndReason_END_REASON_ABORT { // a reason that only newer clients know
		reason = proto.EndReason_END_REASON_UNSPECIFIED
	}
	return abi.Hints{
		Reason: abi.EndReason(reason), TokensIn: m.GetTokensIn(), TokensOut: m.GetTokensOut(),
		Priority: m.GetPriority(), ReturnMS: uint32(min(max(m.GetReturnAfter().AsDuration().Milliseconds(), 0), math.MaxUint32)),
	}
}

// outOfPlace refuses a second HELLO, and any other message before the first HELLO.
func (x *session) outOfPlace(id uint64, j *job, hello bool) {
	if hello {
		x.fail(id, invalid("hello", "the session has sent HELLO already"))
		return
	}
	if j.refuse() {
		x.fail(id, invalid("body", "a session's first message is HELLO"))
	}
	x.end(errRefused)
}

func (x *session) cancelJob(id uint64, m *proto.Cancel) error {
	if m.GetJob() == 0 || m.GetJob() >= id {
		return faultf(proto.Code_CODE_UNKNOWN, "job", "%d was never sent", m.GetJob())
	}
	j := x.jobs.get(m.GetJob())
	if j == nil {
		x.done(id)
		return nil
	}
	j.cancel()
	return x.jobs.acknowledge([]*job{j}, func() { x.done(id) })
}

func (x *session) awaitCopies(id uint64, m *proto.AwaitCopies) error {
	jobs, err := x.jobs.named(id, m)
	if err != nil {
		return err
	}
	return x.jobs.acknowledge(jobs, func() { x.done(id) })
}

// unregister handles UNREGISTER. The memory is unmapped once all jobs on it are fenced, in a turn of its own.
func (x *session) unregister(id uint64, m *proto.Unregister) error {
	r, err := x.memory.registered(m.GetGroup())
	if err != nil {
		return err
	}
	forget := func() {
		x.memory.unregister(r)
		x.done(id)
	}
	jobs := x.jobs.list(func(j *job) bool { return j.reg == r }) // no job starts now, because the turn is held
	if len(jobs) == 0 {
		forget()
		return nil
	}
	r.closing = true
	if !x.jobs.wait(func() {
		for _, j := range jobs {
			j.waitFenced()
		}
		x.inbox.Turn.Lock()
		defer x.inbox.Turn.Unlock()
		forget()
	}) {
		return ErrClosing
	}
	return nil
}
