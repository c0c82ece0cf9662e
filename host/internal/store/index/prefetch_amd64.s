//go:build !purego

#include "textflag.h"

// func prefetchLines(list *[PrefetchStep]unsafe.Pointer, span uintptr)
TEXT ·prefetchLines(SB), NOSPLIT, $0-16
	MOVQ list+0(FP), AX
	MOVQ span+8(FP), DX
	MOVQ $8, CX

next:
	MOVQ       (AX), BX
	PREFETCHT0 (BX)
	PREFETCHT0 (BX)(DX*1)
	ADDQ       $8, AX
	DECQ       CX
	JNZ        next
	RET

// A cell matches if it differs from the fingerprint's tag in no bit above its slot.
#define COMPARE(at, X) \
	MOVOU   at(BX), X \
	PXOR    X0, X     \
	PSRLL   X7, X     \
	PCMPEQL X6, X

// func matchBuckets(buckets *[PrefetchStep]*bucket, fps *[PrefetchStep]uint64, shift uint, sets *[PrefetchStep]uint32)
TEXT ·matchBuckets(SB), NOSPLIT, $0-32
	MOVQ buckets+0(FP), AX
	MOVQ fps+8(FP), DX
	MOVQ shift+16(FP), CX
	MOVQ sets+24(FP), DI
	ANDQ $31, CX
	MOVQ CX, X7
	PXOR X6, X6
	MOVQ $8, SI

next:
	XORL     R8, R8
	MOVQ     (AX), BX
	TESTQ    BX, BX
	JZ       done
	MOVL     (DX), R9
	SHLL     CX, R9
	MOVQ     R9, X0
	PSHUFD   $0, X0, X0
	COMPARE(0, X1)
	COMPARE(16, X2)
	COMPARE(32, X3)
	COMPARE(48, X4)
	PACKSSLW X2, X1
	PACKSSLW X4, X3
	PACKSSWB X3, X1
	PMOVMSKB X1, R8

done:
	MOVL R8, (DI)
	ADDQ $8, AX
	ADDQ $8, DX
	ADDQ $4, DI
	DECQ SI
	JNZ  next
	RET
