package doctor

import "github.com/kvhost/kvhost/host/internal/config"

// Need is the memory that a root's entries take when the root is full of the smallest that it is made for.
type Need struct {
	Root        string `json:"root"`
	Entries     uint32 `json:"entries"`
	IndexBytes  uint64 `json:"index_bytes"`
	Policy      string `json:"policy"`
	PolicyBytes uint64 `json:"policy_bytes"`
	PolicyFits  uint32 `json:"policy_entries"` // entries that the policy's limit of memory allows
}

// IndexEntry is the memory of an entry of one rank with a long key in the index.
const IndexEntry = 64

// Needs adds what the roots need to a report. all is what the policies may have together.
func (r *Report) Needs(needs []Need, all uint64) {
	var policies, index uint64
	for _, n := range needs {
		policies, index = policies+n.PolicyBytes, index+n.IndexBytes
		about := "root " + n.Root
		r.find(Note, about, "", "with %d entries, the most that it may have, it needs %s of memory for the index and %s for the policy %s",
			n.Entries, config.SizeText(int64(n.IndexBytes)), config.SizeText(int64(n.PolicyBytes)), n.Policy)
		if n.PolicyFits < n.Entries {
			r.find(Warning, about, "larger chunks, several roots, another policy, or a higher memory_pages",
				"the policy %s may have memory for %d entries: with more it fails, and what was touched least recently goes",
				n.Policy, n.PolicyFits)
		}
	}
	if policies > all {
		r.find(Warning, "policies", "raise policy_memory",
			"they need %s when all roots are full and may have %s together", config.SizeText(int64(policies)), config.SizeText(int64(all)))
	}
	if m := uint64(r.Facts.Machine.MemoryBytes); m > 0 && policies+index > m {
		r.find(Warning, "memory", "lower the capacity, or add memory",
			"the index and the policies of full roots need %s, the machine has %s", config.SizeText(int64(policies+index)), config.SizeText(int64(m)))
	}
	r.Full = needs
}
