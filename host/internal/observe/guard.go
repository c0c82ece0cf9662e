package observe

import (
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"os"
	"slices"
	"strings"
	"time"
	"unicode"

	"github.com/kvhost/kvhost/host/internal/regular"
)

// leastToken is the least length of a token, because shorter ones can be guessed.
const leastToken = 16

// guard admits requests with the right token. If no token is configured, it refuses requests by pages of other sites,
// which may be open in a browser on this machine.
type guard struct {
	digest *regular.Renewed[[sha256.Size]byte] // digest of the token; nil if none is configured
	names  []string                            // names of this host
}

func newGuard(file, listen string, log *slog.Logger) (*guard, error) {
	if file == "" {
		name, _, _ := net.SplitHostPort(listen)
		g := &guard{names: []string{name}}
		if name, err := os.Hostname(); err == nil {
			g.names = append(g.names, name)
		}
		return g, nil
	}
	digest, err := regular.Renew(func() (digest [sha256.Size]byte, err error) {
		token, err := readToken(file)
		if err != nil {
			return digest, fmt.Errorf("http.token_file: %w", err)
		}
		return sha256.Sum256([]byte(token)), nil
	}, log, file)
	return &guard{digest: digest}, err
}

func readToken(file string) (string, error) {
	ctx, stop := context.WithTimeout(context.Background(), 5*time.Second)
	defer stop()
	b, err := regular.ReadFile(ctx, file, 4<<10)
	if err != nil {
		return "", err
	}
	token := strings.TrimSpace(strings.TrimPrefix(string(b), "\ufeff"))
	switch {
	case len(token) < leastToken:
		return "", fmt.Errorf("%s: a token of fewer than %d characters can be guessed: try head -c 32 /dev/urandom | base64", file, leastToken)
	case strings.ContainsFunc(token, unicode.IsControl):
		return "", fmt.Errorf("%s: want one line of text, which a request can have in its head", file)
	}
	return token, nil
}

// protect answers 401 to requests without the token. It compares digests, so that the time of the comparison reveals nothing
// about the token.
func (g *guard) protect(next http.Handler) http.Handler {
	if g.digest == nil {
		return g.sameSite(next)
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		token, ok := strings.CutPrefix(r.Header.Get("Authorization"), "Bearer ")
		sum, want := sha256.Sum256([]byte(token)), g.digest.Now()
		if !ok || subtle.ConstantTimeCompare(sum[:], want[:]) != 1 {
			w.Header().Set("WWW-Authenticate", `Bearer realm="kvhost"`)
			http.Error(w, "this needs the token of http.token_file as Authorization: Bearer", http.StatusUnauthorized)
			return
		}
		next.ServeHTTP(w, r)
	})
}

// sameSite answers 403 to requests by pages of other sites. These have the Origin of another site, or they address this host by
// a name that is not its own, because another site can make its name resolve to this host. Addresses, and names without a dot,
// are always accepted.
func (g *guard) sameSite(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		name := r.Host
		if host, _, err := net.SplitHostPort(name); err == nil {
			name = host
		}
		name = strings.TrimSuffix(name, ".") // the dot at the end of a fully qualified name
		_, err := netip.ParseAddr(strings.Trim(name, "[]"))
		own := err == nil || !strings.Contains(name, ".") ||
			slices.ContainsFunc(g.names, func(n string) bool { return strings.EqualFold(n, name) })
		origin, err := url.Parse(r.Header.Get("Origin"))
		if own && err == nil && (r.Header.Get("Origin") == "" || origin.Host == r.Host) {
			next.ServeHTTP(w, r)
			return
		}
		http.Error(w, fmt.Sprintf("Host %q with Origin %q may be another site: use this host's address, or set http.token_file",
			r.Host, r.Header.Get("Origin")), http.StatusForbidden)
	})
}
