package kv

import (
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"iter"
	"maps"
	"slices"
	"strconv"
	"strings"
)

// Digest is the first 16 bytes of a SHA-256, of a namespace's text or of a plan.
type Digest [16]byte

// String returns the digest in hexadecimal.
func (d Digest) String() string { return hex.EncodeToString(d[:]) }

// ParseDigest is the inverse of String.
func ParseDigest(s string) (Digest, error) {
	var d Digest
	b, err := hex.DecodeString(s)
	if err != nil || len(b) != len(d) {
		return d, fmt.Errorf("%w: digest %q is not 32 hexadecimal digits", ErrNamespace, s)
	}
	if copy(d[:], b); d.String() != s { // upper case would be a second name
		return Digest{}, fmt.Errorf("%w: digest %q is not in lower case", ErrNamespace, s)
	}
	return d, nil
}

func digest(text []byte) Digest {
	sum := sha256.Sum256(text)
	return Digest(sum[:16])
}

// Lookup is the way in which a group's keys are looked up.
type Lookup uint8

const (
	ByPrefix     Lookup = iota // a hit is a contiguous run from the first key
	ByMembership               // each key is looked up by itself
)

func (l Lookup) String() string {
	if l == ByMembership {
		return "membership"
	}
	return "prefix"
}

// Group is one KV-cache group of the engine. Its geometry gives the pages of a chunk.
type Group struct {
	ID       uint32
	Lookup   Lookup
	Geometry Geometry
}

// Namespace holds all properties, besides tokens and rank, on which the bytes of an engine depend. Two namespaces that differ
// in any field but PageDType never share a file. Further properties are in Extra. With Units, TensorParallel only describes the
// engine, and engines of other sizes share files.
type Namespace struct {
	Model           string
	Revision        string
	DType           string // type of the KV cache, with its scaling
	Engine          string
	HashAlgorithm   string
	HashSeed        string // seed of the hash chain, for example NONE_HASH
	KeyBytes        int    // length of the engine's hashes, 8 to 32
	TokensPerBlock  int
	TensorParallel  int
	PipelineStages  int
	ContextParallel int
	Replicated      bool // all ranks hold the same bytes (MLA), so one piece serves all
	Units           int  // number of pieces of a stage's chunk, each a run of KV heads, for any tensor-parallel size; 0 means one piece for each rank
	Groups          []Group
	Extra           map[string]string
	PageDType       string // type of the values in pages if DType does not say it; only a hint for compression
}

// Ranks returns the number of pieces of a chunk: ranks with different bytes, or units.
func (n *Namespace) Ranks() int {
	switch {
	case n.Units > 0:
		return n.Units * max(1, n.PipelineStages)
	case n.Replicated:
		return max(1, n.PipelineStages)
	}
	return max(1, n.TensorParallel) * max(1, n.PipelineStages) * max(1, n.ContextParallel)
}

// Pieces returns the pieces of an engine's rank, as the first one and their number. With Units, a rank has several consecutive
// units or one unit. If there are more ranks than units, several ranks have the same unit.
func (n *Namespace) Pieces(rank uint32) (first, count uint32) {
	perStage := uint32(max(1, n.TensorParallel) * max(1, n.ContextParallel))
	stage, in, units := rank/perStage, rank%perStage, uint32(n.Units)
	switch {
	case units > 0:
		return stage*units + uint32(uint64(in)*uint64(units)/uint64(perStage)), max(1, units/perStage)
	case n.Replicated:
		return stage, 1
	}
	return rank, 1
}

// Element returns the size of the numbers in the pages in bytes, as relevant to a codec: 2 for floats of 16 bits, and 1
// otherwise. Engines give the type of the cache. If it is "auto", the model's type follows ("auto/bfloat16").
func (n *Namespace) Element() int {
	kind, model, _ := strings.Cut(strings.ToLower(cmp.Or(n.PageDType, n.DType)), "/")
	if kind == "auto" {
		kind = model
	}
	switch strings.TrimPrefix(kind, "torch.") {
	case "bf16", "bfloat16", "fp16", "f16", "float16", "half":
		return 2
	}
	return 1
}

// MaxRanks is the maximum of Ranks, because the present pieces are bits of one word.
const MaxRanks = 64

// Validate returns an error if the namespace is not valid.
func (n *Namespace) Validate() error {
	switch {
	case n.Model == "":
		return fmt.Errorf("%w: no model", ErrNamespace)
	case n.DType == "":
		return fmt.Errorf("%w: no dtype", ErrNamespace)
	case n.KeyBytes < 8 || n.KeyBytes > KeyBytes:
		return fmt.Errorf("%w: key_bytes %d, want 8 to %d", ErrNamespace, n.KeyBytes, KeyBytes)
	case n.TokensPerBlock < 1:
		return fmt.Errorf("%w: tokens_per_block %d", ErrNamespace, n.TokensPerBlock)
	case n.TensorParallel < 0 || n.PipelineStages < 0 || n.ContextParallel < 0:
		return fmt.Errorf("%w: a parallel size is negative", ErrNamespace)
	case n.Units < 0 || n.Units > MaxRanks:
		return fmt.Errorf("%w: %d units, at most %d", ErrNamespace, n.Units, MaxRanks)
	case n.Units > 0 && (n.Replicated || n.ContextParallel > 1):
		return fmt.Errorf("%w: units of replicated or context-parallel ranks", ErrNamespace)
	case n.Units > 0 && n.Units%max(1, n.TensorParallel) != 0 && n.TensorParallel%n.Units != 0:
		return fmt.Errorf("%w: %d units cannot be divided among %d ranks", ErrNamespace, n.Units, n.TensorParallel)
	case n.Ranks() > MaxRanks:
		return fmt.Errorf("%w: %d ranks, at most %d", ErrNamespace, n.Ranks(), MaxRanks)
	case len(n.Groups) == 0:
		return fmt.Errorf("%w: no groups", ErrNamespace)
	}
	for i, g := range n.Groups {
		if slices.ContainsFunc(n.Groups[:i], func(o Group) bool { return o.ID == g.ID }) {
			return fmt.Errorf("%w: group %d twice", ErrNamespace, g.ID)
		}
		if err := g.Geometry.Validate(); err != nil {
			return fmt.Errorf("group %d: %w", g.ID, err)
		}
	}
	return n.validateText()
}

func (n *Namespace) validateText() error {
	named := map[string]string{
		"model": n.Model, "revision": n.Revision, "dtype": n.DType, "engine": n.Engine,
		"hash_algorithm": n.HashAlgorithm, "hash_seed": n.HashSeed, "page_dtype": n.PageDType,
	}
	for k, v := range n.Extra {
		if k == "" || strings.ContainsAny(k, "=\n\r\x00") {
			return fmt.Errorf("%w: extra key %q", ErrNamespace, k)
		}
		named["extra."+k] = v
	}
	for k, v := range named {
		if strings.ContainsAny(v, "\n\r\x00") {
			return fmt.Errorf("%w: %s holds a line break or NUL", ErrNamespace, k)
		}
		if len(v) > 1024 {
			return fmt.Errorf("%w: %s is %d bytes long, at most 1024", ErrNamespace, k, len(v))
		}
	}
	return nil
}

// Group returns a group by its id.
func (n *Namespace) Group(id uint32) (*Group, bool) {
	for i := range n.Groups {
		if n.Groups[i].ID == id {
			return &n.Groups[i], true
		}
	}
	return nil, false
}

// Text returns the canonical form: sorted lines "key=value\n". Its digest identifies the namespace on disk.
func (n *Namespace) Text() string {
	lines := []string{
		"model=" + n.Model,
		"revision=" + n.Revision,
		"dtype=" + n.DType,
		"engine=" + n.Engine,
		"hash_algorithm=" + n.HashAlgorithm,
		"hash_seed=" + n.HashSeed,
		"key_bytes=" + strconv.Itoa(n.KeyBytes),
		"tokens_per_block=" + strconv.Itoa(n.TokensPerBlock),
		"pipeline_stages=" + strconv.Itoa(max(1, n.PipelineStages)),
	}
	if n.Units > 0 {
		lines = append(lines, "units="+strconv.Itoa(n.Units))
	} else {
		lines = append(lines, "tensor_parallel="+strconv.Itoa(max(1, n.TensorParallel)),
			"context_parallel="+strconv.Itoa(max(1, n.ContextParallel)), "replicated="+strconv.FormatBool(n.Replicated))
	}
	for _, g := range n.Groups {
		lines = append(lines, fmt.Sprintf("group.%d=%s %s", g.ID, g.Lookup, g.Geometry.text()))
	}
	for k, v := range n.Extra {
		lines = append(lines, "extra."+k+"="+v)
	}
	slices.Sort(lines)
	return strings.Join(lines, "\n") + "\n"
}

// ParseNamespace is the inverse of Text. The text does not contain PageDType, and with Units it does not contain
// TensorParallel.
func ParseNamespace(text string) (*Namespace, error) {
	n := &Namespace{}
	for key, value := range fields(text) {
		if err := n.setField(key, value); err != nil {
			return nil, fmt.Errorf("%w: %s: %w", ErrNamespace, key, err)
		}
	}
	if err := n.Validate(); err != nil {
		return nil, err
	}
	if n.Text() != text {
		return nil, fmt.Errorf("%w: not in canonical form", ErrNamespace)
	}
	return n, nil
}

func (n *Namespace) setField(key, value string) (err error) {
	number := func(to *int) error {
		*to, err = strconv.Atoi(value)
		return err
	}
	switch key {
	case "model":
		n.Model = value
	case "revision":
		n.Revision = value
	case "dtype":
		n.DType = value
	case "engine":
		n.Engine = value
	case "hash_algorithm":
		n.HashAlgorithm = value
	case "hash_seed":
		n.HashSeed = value
	case "key_bytes":
		return number(&n.KeyBytes)
	case "tokens_per_block":
		return number(&n.TokensPerBlock)
	case "tensor_parallel":
		return number(&n.TensorParallel)
	case "pipeline_stages":
		return number(&n.PipelineStages)
	case "context_parallel":
		return number(&n.ContextParallel)
	case "units":
		return number(&n.Units)
	case "replicated":
		n.Replicated, err = strconv.ParseBool(value)
		return err
	default:
		if id, is := strings.CutPrefix(key, "group."); is {
			return n.addGroup(id, value)
		}
		name, _ := strings.CutPrefix(key, "extra.")
		if n.Extra == nil {
			n.Extra = map[string]string{}
		}
		n.Extra[name] = value
	}
	return nil
}

func (n *Namespace) addGroup(id, value string) error {
	number, err := strconv.ParseUint(id, 10, 32)
	if err != nil {
		return err
	}
	g := Group{ID: uint32(number)}
	lookup, geometry, _ := strings.Cut(value, " ")
	if lookup == ByMembership.String() {
		g.Lookup = ByMembership
	}
	if err := g.Geometry.parse(geometry); err != nil {
		return err
	}
	n.Groups = append(n.Groups, g)
	return nil
}

// Digest returns the digest of the namespace's text, which identifies the namespace.
func (n *Namespace) Digest() Digest { return TextDigest([]byte(n.Text())) }

// TextDigest returns the digest of the namespace with this text.
func TextDigest(text []byte) Digest { return digest(text) }

// Diff describes the first field in which two namespaces differ, with both values. It is empty if they agree.
func (n *Namespace) Diff(o *Namespace) string {
	a, b := maps.Collect(fields(n.Text())), maps.Collect(fields(o.Text()))
	all := maps.Clone(a)
	maps.Copy(all, b)
	for _, k := range slices.Sorted(maps.Keys(all)) {
		if a[k] != b[k] {
			return fmt.Sprintf("%s: %q against %q", k, a[k], b[k])
		}
	}
	return ""
}

// fields iterates over the keys and values of a text in order.
func fields(text string) iter.Seq2[string, string] {
	return func(yield func(key, value string) bool) {
		for line := range strings.Lines(text) {
			key, value, _ := strings.Cut(strings.TrimSuffix(line, "\n"), "=")
			if !yield(key, value) {
				return
			}
		}
	}
}
