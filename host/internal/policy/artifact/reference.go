package artifact

import (
	"fmt"
	"path/filepath"
	"regexp"
	"strings"
)

// scheme begins every reference.
const scheme = "oci://"

// Reference names an artifact in a registry: by its digest, or by a tag, which may come to mean another.
type Reference struct {
	Registry, Repository string
	Tag                  string
	Digest               string // sha256: and 64 hexadecimal digits; empty where there is a tag
}

// Named reports whether a module is named by a reference, and not by a path or a name.
func Named(module string) bool { return strings.HasPrefix(module, scheme) }

// As the OCI distribution specification defines them.
var (
	registryForm   = regexp.MustCompile(`^(?:[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?|\[[0-9A-Fa-f:]+\])(?::[0-9]{1,5})?$`)
	repositoryForm = regexp.MustCompile(`^[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*(?:/[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*)*$`)
	tagForm        = regexp.MustCompile(`^[A-Za-z0-9_][A-Za-z0-9._-]{0,127}$`)
	digestForm     = regexp.MustCompile(`^sha256:[0-9a-f]{64}$`)
)

const longestReference = 1024

// Parse reads oci://registry/repository, with :tag or @sha256:digest.
func Parse(text string) (r Reference, err error) {
	bad := func(why string) (Reference, error) {
		return Reference{}, fmt.Errorf("%w: %.200q: %s", ErrReference, text, why)
	}
	rest, ok := strings.CutPrefix(text, scheme)
	if !ok || len(text) > longestReference {
		return bad("want oci://registry/name@sha256:..., of at most 1024 bytes")
	}
	rest, r.Digest, ok = strings.Cut(rest, "@")
	if ok && !digestForm.MatchString(r.Digest) {
		return bad("want sha256: and 64 lower-case hexadecimal digits after the @")
	}
	if r.Registry, rest, ok = strings.Cut(rest, "/"); !ok || !registryForm.MatchString(r.Registry) {
		return bad("want a registry's host, and its port where it needs one, before the first /")
	}
	r.Repository, r.Tag, ok = strings.Cut(rest, ":")
	switch {
	case !repositoryForm.MatchString(r.Repository):
		return bad("the repository's name has lower-case letters, digits, and between them one of . _ - /")
	case ok && r.Digest != "":
		return bad("want a tag or a digest, not both")
	case ok && !tagForm.MatchString(r.Tag):
		return bad("want a tag of at most 128 letters, digits, and . _ -")
	}
	return r, nil
}

// Pinned is Parse for places where only a digest will do.
func Pinned(text string) (Reference, error) {
	r, err := Parse(text)
	if err == nil && r.Digest == "" {
		err = fmt.Errorf("%w: %s names no digest, and a tag may mean another module tomorrow: `kvhost policy pull %s` prints what to "+
			"write instead", ErrReference, text, text)
	}
	return r, err
}

// Label is what a module is called by its path, its name, or its reference.
func Label(module string) string {
	if r, err := Parse(module); err == nil {
		return r.Name()
	}
	return strings.TrimSuffix(filepath.Base(module), ".wasm")
}

// Name is the last part of the repository.
func (r Reference) Name() string { return r.Repository[strings.LastIndexByte(r.Repository, '/')+1:] }

// At is the same repository with a digest.
func (r Reference) At(digest string) Reference {
	return Reference{Registry: r.Registry, Repository: r.Repository, Digest: digest}
}

func (r Reference) String() string {
	s := scheme + r.Registry + "/" + r.Repository
	switch {
	case r.Digest != "":
		return s + "@" + r.Digest
	case r.Tag != "":
		return s + ":" + r.Tag
	}
	return s
}
