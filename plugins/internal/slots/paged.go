package slots

import "unsafe"

const (
	pageBits = 12
	// PageLen is the number of elements of a page.
	PageLen = 1 << pageBits
)

// Array is an array of n elements, of which only those on allocated pages are in memory. T must have no pointers.
//
// A host names entries by dense numbers: it reuses a slot before it takes one above all that it has used. So a policy
// for many slots needs memory for only a few of them until the root is full. An [Array] allocates a page when the first
// of its elements is needed. Elements on other pages read as the array's blank element, so reading needs no check.
//
// Elements are accessed without the checks of a slice. In a Go guest each check is a possible call, and each call a
// branch table, which costs more than the work itself. So indices must be less than n.
type Array[T any] struct {
	pages unsafe.Pointer // array of pointers to the pages
	blank *[PageLen]T    // page in the place of all unallocated pages; never written
	made  uint32         // all elements from this index on are blank
	n     uint32
}

// NewArray returns an array of n elements that read as blank.
func NewArray[T any](n uint32, blank T) Array[T] {
	a := Array[T]{blank: new([PageLen]T), n: n}
	fill(a.blank[:], blank)
	pages := make([]*[PageLen]T, (uint64(n)+PageLen-1)>>pageBits)
	fill(pages, a.blank)
	a.pages = unsafe.Pointer(unsafe.SliceData(pages))
	return a
}

// fill is a function of its own because the host charges each round of a loop for all of the function around it.
//
//go:noinline
func fill[T any](s []T, v T) {
	for i := range s {
		s[i] = v
	}
}

// Len returns the number of elements.
func (a *Array[T]) Len() uint32 { return a.n }

// Made returns an index from which on all elements are blank.
func (a *Array[T]) Made() uint32 { return a.made }

// Has reports whether the page of element i is allocated, so that the element may be written.
func (a *Array[T]) Has(i uint32) bool { return *a.page(i) != a.blank }

func (a *Array[T]) page(i uint32) **[PageLen]T {
	return (**[PageLen]T)(unsafe.Add(a.pages, uintptr(i>>pageBits)*unsafe.Sizeof(a.pages)))
}

// At returns element i. It must not be written unless its page is allocated.
func (a *Array[T]) At(i uint32) *T { return At[T](a.pages, i) }

// Pages returns the pages for the function At, so that a loop can keep them in a variable.
func (a *Array[T]) Pages() unsafe.Pointer { return a.pages }

// At returns element i of an array, given its pages.
func At[T any](pages unsafe.Pointer, i uint32) *T {
	page := *(*unsafe.Pointer)(unsafe.Add(pages, uintptr(i>>pageBits)*unsafe.Sizeof(pages)))
	return (*T)(unsafe.Add(page, uintptr(i%PageLen)*unsafe.Sizeof(*new(T))))
}

// Make returns element i for writing, and allocates its page if necessary.
func (a *Array[T]) Make(i uint32) *T {
	if !a.Has(i) {
		a.grow(i)
	}
	return a.At(i)
}

//go:noinline
func (a *Array[T]) grow(i uint32) {
	p := new([PageLen]T)
	*p = *a.blank
	*a.page(i) = p
	a.made = max(a.made, min(a.n, (i>>pageBits+1)<<pageBits))
}
