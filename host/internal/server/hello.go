package server

import (
	"strconv"
	"unicode/utf8"

	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/kvhost/kvhost/host/internal/plain"
	"github.com/kvhost/kvhost/host/internal/proto"
	"github.com/kvhost/kvhost/host/internal/store"
	"github.com/kvhost/kvhost/host/kv"
)

// maxName is the maximum number of bytes of an engine id, a role or a device UUID.
const maxName = 256

// hello handles HELLO. It identifies the session, or returns an error about the first field that is wrong.
func (x *session) hello(id uint64, m *proto.Hello) error {
	if m.GetProtocol() != proto.Protocol {
		return invalid("protocol", "%d, this host speaks %d", m.GetProtocol(), proto.Protocol)
	}
	for _, f := range []struct{ field, value string }{{"engine", m.GetEngine()}, {"role", m.GetRole()},
		{"device_uuid", m.GetDeviceUuid()}} {
		if len(f.value) > maxName || !utf8.ValidString(f.value) || plain.Line(f.value) != f.value {
			return invalid(f.field, "not a name of at most %d bytes in one line of characters that are seen", maxName)
		}
	}
	if m.GetEngine() == "" {
		return invalid("engine", "empty")
	}
	ns, err := m.GetNamespace().ToNamespace()
	if err != nil {
		return invalid("namespace", "%v", err)
	}
	if plain.Line(ns.Model) != ns.Model {
		return invalid("namespace.model", "not a name in one line of characters that are seen")
	}
	if diff := x.cfg.Pins.Diff(ns); diff != "" {
		return faultf(proto.Code_CODE_DISAGREEMENT, "namespace", "%s", diff)
	}
	if err := x.admitted(ns, m.GetTenant()); err != nil {
		return err
	}
	first, pieces, err := place(ns, m.GetRank(), m.GetLocalRanks())
	if err != nil {
		return err
	}
	x.ns, x.rank, x.tenant = ns, m.GetRank(), m.GetTenant()
	x.piece, x.units = ns.Pieces(x.rank)
	x.memory.unsealed = m.GetUnsealedMemory()
	x.memory.setDevice(m.GetDeviceUuid())
	queue := "" // queue of host memory; an unknown device gets it, too, because queues are never removed
	if x.memory.gpu != nil {
		queue = x.memory.device
	}
	if x.queue, err = x.server.cfg.Engine.Queue(queue); err != nil {
		return err
	}
	if err := x.share.Greeted(x.number, m); err != nil {
		return err
	}
	f := facts{namespace: ns, localRanks: m.GetLocalRanks(), firstRank: first, pieces: pieces}
	if x.engine, err = x.server.join(x, engineKey{x.tenant, m.GetEngine()}, f); err != nil {
		return err
	}
	x.log = x.log.With("engine", m.GetEngine(), "role", m.GetRole(), "rank", m.GetRank())
	x.log.Info("session started", "namespace", ns.Digest().String(), "model", ns.Model, "local_ranks", m.GetLocalRanks())
	x.profile.Store(newProfile(&x.server.usage, x.number, ns.Digest().String(), m, queue))
	x.reply(&proto.SessionResponse{Id: id, Body: &proto.SessionResponse_Hello{Hello: x.server.welcome(x)}})
	return nil
}

// welcome returns the answer to an accepted HELLO.
func (s *Server) welcome(x *session) *proto.HelloReply {
	l, digest := x.cfg.Limits, x.ns.Digest()
	return &proto.HelloReply{
		Protocol:        proto.Protocol,
		Version:         s.cfg.Version,
		Nonce:           x.nonce[:],
		KeyBytes:        uint32(x.ns.KeyBytes),
		LeaseTime:       durationpb.New(x.cfg.LeaseTTL),
		Descriptors:     s.path + proto.DescriptorSuffix,
		NamespaceDigest: digest[:],
		Session:         x.number,
		Levels:          uint32(s.cfg.Levels),
		Units:           uint32(x.ns.Units),
		PinBytes:        uint64(store.PinShare * float64(x.cfg.Capacity)),
		Limits: &proto.Limits{
			KeysPerLookup: uint32(l.KeysPerLookup), ChunksPerJob: uint32(l.ChunksPerJob),
			MessageBytes: uint32(l.MessageBytes),
			Jobs:         uint32(l.Jobs), Leases: uint32(l.Leases), Requests: uint32(l.Requests),
			ArenaBytes: uint64(l.SessionArena),
		},
	}
}

// privateField is the extra field that the host adds to the namespace of a private tenant, so that its entries are separate.
const privateField = "kvhost.tenant"

// admitted refuses a tenant that the client's user may not act for. It also gives a private tenant its own namespace.
func (x *session) admitted(ns *kv.Namespace, tenant uint32) error {
	rules := x.cfg.Rules
	if !rules.Allow(x.memory.uid, tenant) {
		return faultf(proto.Code_CODE_DENIED, "tenant", "%d is not for user %d, whose process this is (uids in [[tenant]])",
			tenant, x.memory.uid)
	}
	if _, ok := ns.Extra[privateField]; ok {
		return invalid("namespace", "extra field %q is the host's own", privateField)
	}
	if rules.Private(tenant) {
		if ns.Extra == nil {
			ns.Extra = map[string]string{}
		}
		ns.Extra[privateField] = strconv.FormatUint(uint64(tenant), 10)
	}
	return nil
}

// sessionsOf counts a tenant's sessions. The server's mutex must be held.
func (s *Server) sessionsOf(tenant uint32) (n int) {
	for key, e := range s.engines {
		if key.tenant == tenant {
			n += e.sessions
		}
	}
	return n
}

// join adds a session to its engine, after checking that they agree.
func (s *Server) join(x *session, key engineKey, f facts) (*servingEngine, error) {
	sp, err := s.store.Namespace(x.ctx, f.namespace)
	if err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if limit := x.cfg.Rules.Sessions(x.tenant); limit > 0 && s.sessionsOf(x.tenant) >= limit {
		return nil, faultf(proto.Code_CODE_LIMIT, "tenant", "%d has %d sessions, that is its limit", x.tenant, limit)
	}
	e := s.engines[key]
	if e == nil {
		e = &servingEngine{key: key, facts: f, space: sp, numbers: &s.request, ended: s.store.EndRequest, leases: map[uint64]*sharedLease{},
			requests: map[uint32]*request{}}
		s.engines[key] = e
	} else if err := f.agree(&e.facts); err != nil {
		return nil, err
	}
	e.sessions++
	return e, nil
}
