package observe

import (
	"fmt"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/kvhost/kvhost/host/internal/config"
	"github.com/kvhost/kvhost/host/internal/proto"
	"github.com/kvhost/kvhost/host/internal/store"
	"github.com/kvhost/kvhost/host/internal/store/health"
)

var ofRoot = of[store.RootStats]("root",
	figure{"Capacity", "root_capacity_bytes", "capacity", "Configured limit."},
	figure{"Limit", "root_limit_bytes", "limit", "Bytes that the root may use now: less than its capacity if the file system has less."},
	figure{"Used", "root_used_bytes", "used", "Allocated bytes of pieces, temporaries and quarantine."},
	figure{"Writing", "root_writing_bytes", "writing", "Bytes reserved by stores in flight."},
	figure{"Held", "root_quarantine_bytes", "quarantine", "Bytes of damaged files kept for inspection."},
	figure{"Orphaned", "root_orphan_bytes", "orphaned", "Bytes of files that could not be removed; the removal is retried."},
	figure{"State", "root_state", "", "0: in use; 1: full, stores only where no other root takes them; 2: read-only; 3: out of service."},
	figure{"Outages", "root_outages_total", "outages", "Times that the root went out of service."},
	figure{"Stuck", "root_stuck_operations", "", "Operations that took longer than store.io_timeout and have not ended."},
	figure{"Shared.State", "root_shared_state", "", "0: joining, nothing is served or stored; 1: admitted, the root is being scanned; 2: active."},
	figure{"Shared.Evictor", "root_shared_evictor", "", "1 while this host is the evictor of a shared root."},
	figure{"Shared.Peers", "root_shared_peers", "", "Other hosts of a shared root, including those that have just left."},
	figure{"Shared.Refused", "root_shared_credit_waits_total", "", "Times that a store found too little credit."},
	figure{"Least", "root_compression_least_ratio", "", "Ratio of page bytes to stored bytes from which on chunks are compressed; +Inf: none is."},
	figure{"Entries", "root_entries", "entries", "Entries in the index."},
	figure{"IndexBytes", "root_index_bytes", "", "Memory of the index."},
	figure{"Scanning", "root_scanning", "scanning", "1 while the scan at the start runs."},
	figure{"Evictions", "root_evictions_total", "evictions", "Entries evicted."},
	figure{"Sheds", "root_sheds_total", "sheds", "Stores that found no space."},
	figure{"Expired", "root_expired_total", "", "Entries removed because they expired."},
	figure{"Discarded", "root_discarded_total", "", "Entries removed because a client discarded them."},
	figure{"Written", "root_written_today_bytes", "", "Bytes counted against the daily write budget; 0 without one."},
	figure{"OverBudget", "root_budget_refusals_total", "", "Stores refused because of the daily write budget."},
	figure{"Damaged", "root_damaged_total", "damaged", "Entries dropped because a file was damaged."},
	figure{"Vanished", "root_vanished_total", "", "Files removed by another program."},
	figure{"SyncFails", "root_sync_failures_total", "", "Pieces dropped because a sync failed."},
	figure{"BadVictims", "root_bad_victims_total", "", "Victims named by the policy that could not be evicted."},
	figure{"Unanswered", "root_unanswered_total", "", "Questions to which the policy named no entry that can go, although one could."},
	figure{"PlaceFaults", "root_place_faults_total", "", "Paths that held another key's file."},
)

var (
	rootMemory   = newFamily("root_memory_bytes", "Memory of a root in memory: used and free are there, pending is to come.", "root state")
	requests     = newFamily("bucket_requests_total", "Requests to the server of a root in a bucket; result is ok or error.", "root request result")
	requestBytes = newFamily("bucket_bytes_total", "Bytes of objects from (read) and to (write) the server of a root in a bucket.", "root direction")
)

func (h *Host) collectRoots(out series, st *store.Stats) {
	for i := range st.Roots {
		ofRoot.put(out, &st.Roots[i], st.Roots[i].Path)
	}
	for path, fsys := range h.Buckets {
		s := fsys.Stats()
		for kind, n := range s.Requests {
			failed := s.Failed[kind]
			out.put(requests, float64(n-failed), path, kind.String(), "ok")
			out.put(requests, float64(failed), path, kind.String(), "error")
		}
		out.put(requestBytes, float64(s.Read), path, "read")
		out.put(requestBytes, float64(s.Written), path, "write")
	}
	for path, fsys := range h.Memory {
		m := fsys.Stats()
		out.put(rootMemory, float64(m.Used), path, "used")
		out.put(rootMemory, float64(m.Ready-m.Used), path, "free")
		out.put(rootMemory, float64(m.Wanted-m.Ready), path, "pending")
	}
}

func rootStatus(r *store.RootStats) *proto.RootStatus {
	out := &proto.RootStatus{Path: r.Path, Reason: r.Reason, Shared: r.Shared != nil, Compression: r.Why}
	ofRoot.fill(out, r)
	if !r.Since.IsZero() {
		out.Since = timestamppb.New(r.Since)
	}
	switch r.State {
	case health.In:
		out.State = proto.RootState_ROOT_STATE_IN_SERVICE
		if r.Limit < r.Capacity/2 {
			out.Reason = fmt.Sprintf("its file system, less min_free, has room for %s of its capacity", config.SizeText(max(0, r.Limit)))
		}
	case health.Full:
		out.State = proto.RootState_ROOT_STATE_FULL
		out.Reason += fmt.Sprintf(": it holds %s, new chunks take the place of others or go to other roots; next look for room in %s",
			config.SizeText(r.Limit), r.Ceiling.Round(time.Second))
	case health.ReadOnly:
		out.State = proto.RootState_ROOT_STATE_READ_ONLY
	default:
		out.State = proto.RootState_ROOT_STATE_OUT
	}
	return out
}
