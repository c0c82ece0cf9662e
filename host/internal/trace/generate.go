package trace

import (
	"container/heap"
	"fmt"
)

// Mix is the composition of a generated trace.
type Mix struct {
	Seed        uint64
	Requests    int
	BlockTokens int // tokens per hash id
	Prompts     int // shared system prompts of each kind
	Chat        int // weights of the kinds of sessions: conversations,
	Agent       int // agents with sub-agents,
	OneShot     int // and prompts that are asked once
	GapMillis   int // mean time between two new sessions
}

// DefaultMix is a mixture of all kinds, with the seed and the number of requests of the trace in examples/traces.
func DefaultMix() Mix {
	return Mix{Seed: 1, Requests: 2000, BlockTokens: 512, Prompts: 6, Chat: 50, Agent: 10, OneShot: 40, GapMillis: 4000}
}

func (m *Mix) validate() error {
	switch {
	case m.Requests < 1:
		return fmt.Errorf("%w: %d requests", ErrOptions, m.Requests)
	case m.BlockTokens < 1 || m.BlockTokens > 1<<20:
		return fmt.Errorf("%w: %d tokens per block", ErrOptions, m.BlockTokens)
	case m.Prompts < 1 || m.Prompts > 1<<16:
		return fmt.Errorf("%w: %d system prompts", ErrOptions, m.Prompts)
	case m.Chat < 0 || m.Agent < 0 || m.OneShot < 0 || m.Chat+m.Agent+m.OneShot < 1:
		return fmt.Errorf("%w: weights %d, %d, %d", ErrOptions, m.Chat, m.Agent, m.OneShot)
	case m.GapMillis < 1:
		return fmt.Errorf("%w: %d ms between sessions", ErrOptions, m.GapMillis)
	}
	return nil
}

// Generate calls emit with the requests of a trace in order of time. A request is valid during the call.
//
// A prompt's blocks are those that its tokens fill; the partial block at its end has no id. Output tokens become part
// of the prefix of the session's next turn.
func Generate(m Mix, emit func(*Request) error) error {
	if err := m.validate(); err != nil {
		return err
	}
	g := &generator{mix: m, draw: draw{state: m.Seed}}
	for kind := range g.prompts {
		for range m.Prompts {
			g.prompts[kind] = append(g.prompts[kind], g.prompt(kind))
		}
	}
	g.schedule(0, g.arrive)
	for n := 0; n < m.Requests; {
		event := heap.Pop(&g.events).(event)
		g.now = event.at
		if req := event.do(); req != nil {
			n++
			if err := emit(req); err != nil {
				return err
			}
		}
	}
	return nil
}

type generator struct {
	mix     Mix
	draw    draw
	now     int64 // milliseconds
	order   int64
	events  events
	blockID uint64
	prompts [kinds][]*session // what every session of a kind starts from
	req     Request
}

// Kinds of system prompts.
const (
	promptChat = iota
	promptAgent
	promptSub
	kinds
)

// session is one growing prefix.
type session struct {
	blocks []uint64
	tokens int64
}

// grow appends tokens to the prefix and assigns ids to the blocks that they fill.
func (g *generator) grow(s *session, tokens int64) {
	s.tokens += tokens
	for int64(len(s.blocks)+1)*int64(g.mix.BlockTokens) <= s.tokens {
		s.blocks = append(s.blocks, g.blockID)
		g.blockID++
	}
}

// prompt makes a shared prefix: whole blocks, one at least.
func (g *generator) prompt(kind int) *session {
	tokens := [kinds][2]int64{promptChat: {500, 4000}, promptAgent: {8000, 16000}, promptSub: {3000, 6000}}[kind]
	block := int64(g.mix.BlockTokens)
	s := &session{}
	g.grow(s, max(1, g.draw.between(tokens[0], tokens[1])/block)*block)
	return s
}

// start starts a session on a system prompt of this kind. The first prompts are the most popular.
func (g *generator) start(kind int) *session {
	p := g.prompts[kind][g.draw.low(int64(g.mix.Prompts))]
	return &session{blocks: append([]uint64(nil), p.blocks...), tokens: p.tokens}
}

// ask emits a request with the session's prefix, and appends the answer to it.
func (g *generator) ask(s *session, output int64) *Request {
	g.req.Timestamp, g.req.InputLength, g.req.OutputLength = g.now, s.tokens, output
	g.req.HashIDs = append(g.req.HashIDs[:0], s.blocks...)
	g.grow(s, output)
	return &g.req
}

func (g *generator) schedule(after int64, do func() *Request) {
	g.order++
	heap.Push(&g.events, event{at: g.now + after, order: g.order, do: do})
}

// arrive starts a session and schedules the next.
func (g *generator) arrive() *Request {
	g.schedule(1+g.draw.around(int64(g.mix.GapMillis)), g.arrive)
	switch lot := g.draw.below(int64(g.mix.Chat + g.mix.Agent + g.mix.OneShot)); {
	case lot < int64(g.mix.Chat):
		g.chat()
	case lot < int64(g.mix.Chat+g.mix.Agent):
		g.agent()
	default:
		g.oneShot()
	}
	return nil
}

// chat is a conversation: a question, an answer, a pause, and again.
func (g *generator) chat() {
	s := g.start(promptChat)
	left := 1 + g.draw.around(5)
	var turn func() *Request
	turn = func() *Request {
		g.grow(s, 20+g.draw.around(150))
		if g.draw.chance(20) { // something pasted
			g.grow(s, g.draw.between(1000, 8000))
		}
		req := g.ask(s, 20+g.draw.around(350))
		if left--; left > 0 {
			g.schedule(5000+g.draw.around(60_000), turn)
		}
		return req
	}
	g.schedule(0, turn)
}

// oneShot is a document with a question, asked once.
func (g *generator) oneShot() {
	s := g.start(promptChat)
	g.schedule(0, func() *Request {
		g.grow(s, g.draw.between(1000, 20_000))
		return g.ask(s, 20+g.draw.around(300))
	})
}

const (
	agentTokens = 100_000 // an agent stops when its context is this long
	taskTokens  = 1500
)

// agent takes many quick steps on a growing prefix, and sometimes waits for sub-agents.
func (g *generator) agent() {
	s := g.start(promptAgent)
	g.grow(s, 200+g.draw.around(taskTokens))
	left := 5 + g.draw.around(25)
	var step func() *Request
	step = func() *Request {
		req := g.ask(s, 50+g.draw.around(200))
		if left--; left <= 0 || s.tokens > agentTokens {
			return req
		}
		if g.draw.chance(8) {
			waiting := g.draw.between(1, 3)
			for range waiting {
				g.subAgent(func() {
					g.grow(s, 100+g.draw.around(500)) // its report
					if waiting--; waiting == 0 {
						g.schedule(500, step)
					}
				})
			}
			return req
		}
		g.grow(s, 30+g.draw.around(1200)) // a tool's output
		g.schedule(1000+g.draw.around(6000), step)
		return req
	}
	g.schedule(0, step)
}

// subAgent works on its own task and reports at the end.
func (g *generator) subAgent(done func()) {
	s := g.start(promptSub)
	g.grow(s, 200+g.draw.around(taskTokens))
	left := 2 + g.draw.around(6)
	var step func() *Request
	step = func() *Request {
		req := g.ask(s, 50+g.draw.around(150))
		if left--; left <= 0 {
			done()
			return req
		}
		g.grow(s, 30+g.draw.around(1000))
		g.schedule(1000+g.draw.around(4000), step)
		return req
	}
	g.schedule(g.draw.between(100, 1000), step)
}

type event struct {
	at    int64
	order int64 // among events of the same time
	do    func() *Request
}

// events is a heap by time.
type events []event

func (e events) Len() int { return len(e) }
func (e events) Less(i, j int) bool {
	return e[i].at < e[j].at || e[i].at == e[j].at && e[i].order < e[j].order
}
func (e events) Swap(i, j int) { e[i], e[j] = e[j], e[i] }
func (e *events) Push(x any)   { *e = append(*e, x.(event)) }
func (e *events) Pop() any {
	last := len(*e) - 1
	x := (*e)[last]
	*e = (*e)[:last]
	return x
}
