package command

import (
	"encoding/json"
	"io"
	"slices"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/internal/policy"
	"github.com/kvhost/kvhost/host/internal/sim"
)

// callsTo returns an observer that writes calls as JSON, with the records and the fields of the ABI.
func callsTo(w io.Writer) policy.Observer {
	out := json.NewEncoder(w)
	return func(c *policy.Call) error {
		row := struct {
			*policy.Call
			Events     []any           `json:",omitempty"`
			Candidates []abi.Candidate `json:",omitempty"`
			Path       string          `json:",omitempty"`
			Err        string          `json:",omitempty"`
		}{Call: c, Candidates: slices.Clone(c.Candidates), Path: string(c.Path)}
		for _, e := range c.Events {
			if e.Op == abi.OpRequestEnd {
				row.Events = append(row.Events, struct {
					Op string
					abi.RequestEnd
				}{e.Op.String(), *e.RequestEnd()})
				continue
			}
			e.Key, e.ParentKey = hashID(e.Key), hashID(e.ParentKey)
			row.Events = append(row.Events, struct {
				Op string
				abi.Event
			}{e.Op.String(), e})
		}
		for i := range row.Candidates {
			x := &row.Candidates[i]
			x.Key, x.ParentKey = hashID(x.Key), hashID(x.ParentKey)
		}
		if c.Err != nil {
			row.Err = c.Err.Error()
		}
		return out.Encode(row)
	}
}

// hashID returns the hash id in the trace for a fingerprint, and 0 for none.
func hashID(key uint64) uint64 {
	if key == 0 {
		return 0
	}
	return sim.HashID(key)
}
