package trace

// Stats describes a trace.
type Stats struct {
	Requests     int64
	Accesses     int64 // hash ids in all requests
	Unique       int64
	OneTime      int64 // unique ids that are used once
	PrefixHits   int64 // accesses that an infinite cache answers as part of a contiguous prefix
	OtherParents int64 // accesses of an id that had another parent before: 0 in a chained trace
	SpanMillis   int64 // from the first timestamp to the last
	InputTokens  int64
	OutputTokens int64
	Blocks       *Histogram // ids per request
	ReuseMillis  *Histogram // between two uses of an id
}

// HitRatio is the share of accesses of an id that was used before: the hit ratio of an infinite cache.
func (s *Stats) HitRatio() float64 { return share(s.Accesses-s.Unique, s.Accesses) }

// PrefixHitRatio is the share of accesses in the leading part of a request that was used before.
func (s *Stats) PrefixHitRatio() float64 { return share(s.PrefixHits, s.Accesses) }

// OneTimeShare is the share of unique ids that are used once.
func (s *Stats) OneTimeShare() float64 { return share(s.OneTime, s.Unique) }

func share(n, of int64) float64 {
	if of == 0 {
		return 0
	}
	return float64(n) / float64(of)
}

// Collector collects the statistics of a trace, request by request.
type Collector struct {
	stats  Stats
	blocks map[uint64]blockUse
	first  int64
	last   int64
}

type blockUse struct {
	parent uint64
	last   int64 // timestamp
	again  bool
}

// noParent stands for the parent of a request's first block.
const noParent = ^uint64(0)

// NewCollector returns an empty collector.
func NewCollector() *Collector {
	return &Collector{
		stats:  Stats{Blocks: NewHistogram(14), ReuseMillis: NewHistogram(10)},
		blocks: map[uint64]blockUse{},
	}
}

// Add counts one request.
func (c *Collector) Add(req *Request) {
	s := &c.stats
	if s.Requests == 0 {
		c.first, c.last = req.Timestamp, req.Timestamp
	}
	c.first, c.last = min(c.first, req.Timestamp), max(c.last, req.Timestamp)
	s.Requests++
	s.Accesses += int64(len(req.HashIDs))
	s.InputTokens += req.InputLength
	s.OutputTokens += req.OutputLength
	s.Blocks.Record(uint64(len(req.HashIDs)))
	parent, prefix := noParent, true
	for _, id := range req.HashIDs {
		use, known := c.blocks[id]
		if !known {
			prefix = false
			use.parent = parent
			s.Unique++
			s.OneTime++
		} else {
			if prefix {
				s.PrefixHits++
			}
			if use.parent != parent {
				s.OtherParents++
			}
			if !use.again {
				use.again = true
				s.OneTime--
			}
			s.ReuseMillis.Record(uint64(max(0, req.Timestamp-use.last)))
		}
		use.last = req.Timestamp
		c.blocks[id] = use
		parent = id
	}
}

// Stats returns the statistics so far. It shares the collector's histograms.
func (c *Collector) Stats() Stats {
	s := c.stats
	s.SpanMillis = c.last - c.first
	return s
}
