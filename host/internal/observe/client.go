package observe

import (
	"strconv"

	"github.com/kvhost/kvhost/host/internal/server"
)

var clientSeconds = newFamily("client_seconds", "Time from the receipt of a message to its answer.", "answer")

var ofUsage = of[server.Usage]("model tenant",
	figure{"Keys", "model_lookup_keys_total", "keys", "Keys looked up."},
	figure{"Hits", "model_lookup_hits_total", "hits", "Keys granted with a lease."},
	figure{"LoadedBytes", "model_loaded_bytes_total", "loaded_bytes", "Bytes of pages delivered."},
	figure{"StoredBytes", "model_stored_bytes_total", "stored_bytes", "Bytes of pages published."},
)

func collectClients(out series, s *server.Server) {
	for _, l := range s.Latencies() {
		histogram(out, clientSeconds, l.Sum.Seconds(), server.LatencyBounds[:], l.Buckets[:], l.Answer.String())
	}
	for _, u := range s.Usage() {
		ofUsage.put(out, u, u.Model, strconv.FormatUint(uint64(u.Tenant), 10))
	}
}
