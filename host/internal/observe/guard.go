package observe

import (
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"time"

	"github.com/kvhost/kvhost/host/internal/regular"
)

// leastToken is the least length of a token: shorter ones can be guessed.
const leastToken = 16

// guard lets requests with the right token pass.
type guard struct {
	digest [sha256.Size]byte
	open   bool // no token is wanted
}

func newGuard(file string) (*guard, error) {
	if file == "" {
		return &guard{open: true}, nil
	}
	ctx, stop := context.WithTimeout(context.Background(), 5*time.Second)
	defer stop()
	b, err := regular.ReadFile(ctx, file, 4<<10)
	if err != nil {
		return nil, fmt.Errorf("http.token_file: %w", err)
	}
	token := strings.TrimSpace(string(b))
	if len(token) < leastToken {
		return nil, fmt.Errorf("http.token_file: %s: %w", file,
			errors.New("a token of fewer than 16 characters can be guessed: try head -c 32 /dev/urandom | base64"))
	}
	return &guard{digest: sha256.Sum256([]byte(token))}, nil
}

// protect answers 401 to requests without the token. Digests are compared, so that the time tells nothing of the token.
func (g *guard) protect(next http.Handler) http.Handler {
	if g.open {
		return next
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		token, ok := strings.CutPrefix(r.Header.Get("Authorization"), "Bearer ")
		sum := sha256.Sum256([]byte(token))
		if !ok || subtle.ConstantTimeCompare(sum[:], g.digest[:]) != 1 {
			w.Header().Set("WWW-Authenticate", `Bearer realm="kvhost"`)
			http.Error(w, "this needs the token of http.token_file as Authorization: Bearer", http.StatusUnauthorized)
			return
		}
		next.ServeHTTP(w, r)
	})
}
