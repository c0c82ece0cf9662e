package observe

import (
	"crypto/tls"
	"fmt"
	"os"
	"sync"
	"time"
)

// certificate is a certificate on disk, read again when it was renewed.
type certificate struct {
	certFile, keyFile string

	mu      sync.Mutex
	loaded  *tls.Certificate
	changed [2]time.Time // the files' times of the loaded one
}

func loadCertificate(certFile, keyFile string) (*certificate, error) {
	c := &certificate{certFile: certFile, keyFile: keyFile}
	return c, c.load(c.times())
}

func (c *certificate) times() (t [2]time.Time) {
	for i, name := range []string{c.certFile, c.keyFile} {
		if st, err := os.Stat(name); err == nil {
			t[i] = st.ModTime()
		}
	}
	return t
}

func (c *certificate) load(changed [2]time.Time) error {
	pair, err := tls.LoadX509KeyPair(c.certFile, c.keyFile)
	if err != nil {
		return fmt.Errorf("http.tls_cert, http.tls_key: %w", err)
	}
	c.loaded, c.changed = &pair, changed
	return nil
}

// get is for tls.Config. While a renewal is half written, the old certificate is used.
func (c *certificate) get(*tls.ClientHelloInfo) (*tls.Certificate, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if t := c.times(); t != c.changed {
		_ = c.load(t)
	}
	return c.loaded, nil
}
