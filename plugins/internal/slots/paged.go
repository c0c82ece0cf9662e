package slots

import "unsafe"

const (
	pageBits = 12
	// PageLen is how many elements come at once.
	PageLen = 1 << pageBits
)

// Array is n elements by slot, of which only those on pages that were made are in memory. T has no pointers.
//
// A host names entries by dense numbers: it uses a slot again before it takes one above all that it has used. So a
// policy for many slots needs memory for few of them until the root is full. An [Array] makes a page of
// elements when the first of them is needed. Elements of pages that were not made read as the array's blank one, so
// that reading needs no check.
//
// Elements are reached without the checks of a slice: in a Go guest each check is a possible call, and each call a
// branch table, which costs more than the work. So indices must be below n.
type Array[T any] struct {
	pages unsafe.Pointer // *unsafe.Pointer: of each page
	blank *[PageLen]T    // in the place of all pages that were not made; never written
	made  uint32         // every page below this index was made, or may be
	n     uint32
}

// NewArray makes an array of n elements that read as blank.
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

// Len is how many elements there are.
func (a *Array[T]) Len() uint32 { return a.n }

// Made is a number of elements beyond which all are blank.
func (a *Array[T]) Made() uint32 { return a.made }

// Has says whether element i may be written.
func (a *Array[T]) Has(i uint32) bool { return *a.page(i) != a.blank }

func (a *Array[T]) page(i uint32) **[PageLen]T {
	return (**[PageLen]T)(unsafe.Add(a.pages, uintptr(i>>pageBits)*unsafe.Sizeof(a.pages)))
}

// At is element i, which is only to be read unless it was made.
func (a *Array[T]) At(i uint32) *T { return At[T](a.pages, i) }

// Pages is the array for [At], where a loop keeps it in a variable.
func (a *Array[T]) Pages() unsafe.Pointer { return a.pages }

// At is element i of the array that pages is of.
func At[T any](pages unsafe.Pointer, i uint32) *T {
	page := *(*unsafe.Pointer)(unsafe.Add(pages, uintptr(i>>pageBits)*unsafe.Sizeof(pages)))
	return (*T)(unsafe.Add(page, uintptr(i%PageLen)*unsafe.Sizeof(*new(T))))
}

// Make is element i, to be written.
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
