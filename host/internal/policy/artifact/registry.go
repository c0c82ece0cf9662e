package artifact

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"

	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"oras.land/oras-go/v2/registry/remote"
	"oras.land/oras-go/v2/registry/remote/auth"
	"oras.land/oras-go/v2/registry/remote/credentials"
)

// errRegistry means that a registry could not be asked, or refused.
var errRegistry = errors.New("policy: registry")

// Options say how a registry is spoken to.
type Options struct {
	// PlainHTTP speaks HTTP without TLS to a registry that is not on this machine, and then without credentials. A registry on
	// loopback is spoken to like that anyhow.
	PlainHTTP bool
	Version   string // of kvhost
}

// open makes a repository's client. Credentials are those of `docker login`, also from its helpers.
func open(r Reference, opt Options) (*remote.Repository, error) {
	repo, err := remote.NewRepository(r.Registry + "/" + r.Repository)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrReference, err)
	}
	local := loopback(r.Registry)
	repo.PlainHTTP = opt.PlainHTTP || local
	client := &auth.Client{
		Client: &http.Client{CheckRedirect: redirect}, Cache: auth.NewCache(),
		Header: http.Header{"User-Agent": {"kvhost/" + opt.Version}},
	}
	if !repo.PlainHTTP || local {
		store, err := credentials.NewStoreFromDocker(credentials.StoreOptions{})
		if err != nil {
			return nil, fmt.Errorf("%w: docker's configuration, which may have its credentials: %w", errRegistry, err)
		}
		client.Credential = credentials.Credential(store)
	}
	repo.Client = client
	return repo, nil
}

// loopback reports whether a registry is on this machine.
func loopback(registry string) bool {
	host, _, err := net.SplitHostPort(registry)
	if err != nil {
		host = registry
	}
	ip := net.ParseIP(host)
	return host == "localhost" || ip != nil && ip.IsLoopback()
}

// redirect follows a registry to where it keeps its blobs, but not from TLS to none.
func redirect(q *http.Request, via []*http.Request) error {
	switch {
	case len(via) >= 10:
		return errors.New("10 redirects")
	case via[0].URL.Scheme == "https" && q.URL.Scheme != "https":
		return errors.New("a redirect that leaves TLS")
	}
	return nil
}

// Push brings an artifact to a registry. Only commands call it and Pull: a host starts from the local store, and never asks a
// registry. With a tag that comes to mean it.
func Push(ctx context.Context, r Reference, a *Artifact, opt Options) error {
	repo, err := open(r, opt)
	if err != nil {
		return err
	}
	for _, b := range [][]byte{Empty, a.Module, a.Signature} {
		if b == nil {
			continue
		}
		d := ocispec.Descriptor{MediaType: "application/octet-stream", Digest: digest.FromBytes(b), Size: int64(len(b))}
		if there, err := repo.Blobs().Exists(ctx, d); err == nil && there {
			continue
		}
		if err := repo.Blobs().Push(ctx, d, bytes.NewReader(b)); err != nil {
			return fmt.Errorf("%w: push to %s: %w", errRegistry, r, err)
		}
	}
	d := ocispec.Descriptor{MediaType: manifestType, Digest: digest.Digest(a.Digest), Size: int64(len(a.Manifest))}
	if err := repo.Manifests().PushReference(ctx, d, bytes.NewReader(a.Manifest), cmp.Or(r.Tag, a.Digest)); err != nil {
		return fmt.Errorf("%w: push to %s: %w", errRegistry, r, err)
	}
	return nil
}

// Pull brings an artifact, whose module has at most maxModule bytes, from a registry. Its bytes are those that the digest names; a tag
// names what it means now.
func Pull(ctx context.Context, r Reference, maxModule int64, opt Options) (*Artifact, error) {
	repo, err := open(r, opt)
	if err != nil {
		return nil, err
	}
	of, body, err := repo.Manifests().FetchReference(ctx, cmp.Or(r.Digest, r.Tag, "latest"))
	if err != nil {
		return nil, fmt.Errorf("%w: pull %s: %w", errRegistry, r, err)
	}
	text, err := read(body, maxManifest)
	if err != nil {
		return nil, fmt.Errorf("%w: pull %s: manifest: %w", errRegistry, r, err)
	}
	named := cmp.Or(r.Digest, of.Digest.String()) // or what the registry says that the tag means
	module, signature, err := Layers(named, text, maxModule)
	if err != nil {
		return nil, fmt.Errorf("pull %s: %w", r, err)
	}
	a := &Artifact{Digest: named, Manifest: text}
	if a.Module, err = blob(ctx, repo, "module", module); err == nil && signature != nil {
		a.Signature, err = blob(ctx, repo, "signature", signature)
	}
	if err != nil {
		return nil, fmt.Errorf("pull %s: %w", r, err)
	}
	return a, nil
}

// blob fetches what a descriptor names, and no more.
func blob(ctx context.Context, repo *remote.Repository, what string, d *Descriptor) ([]byte, error) {
	body, err := repo.Blobs().Fetch(ctx, ocispec.Descriptor{MediaType: d.MediaType, Digest: digest.Digest(d.Digest), Size: d.Size})
	if err != nil {
		return nil, fmt.Errorf("%w: %s: %w", errRegistry, what, err)
	}
	b, err := read(body, d.Size)
	if err != nil {
		return nil, fmt.Errorf("%w: %s: %w", errRegistry, what, err)
	}
	return b, d.Check(what, b)
}

// read reads all of a body that has at most limit bytes.
func read(body io.ReadCloser, limit int64) ([]byte, error) {
	defer body.Close()
	b, err := io.ReadAll(io.LimitReader(body, limit+1))
	if err == nil && int64(len(b)) > limit {
		err = fmt.Errorf("more than %d bytes", limit)
	}
	return b, err
}
