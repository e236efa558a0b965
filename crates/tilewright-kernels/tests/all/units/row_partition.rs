//! Threads for rows of each length, and the widths of norms.

use tilewright::Dtype;
use tilewright_kernels::{
    norm::NormParams,
    tile::{RowPartition, Strided},
};

#[test]
fn classes_fit_rows_with_few_idle_threads() {
    for chunks in 1..=RowPartition::MAX_CHUNKS {
        let rows = RowPartition::for_chunks(chunks).expect("a class");
        // the name has threads per row and chunks per thread
        let capacity: u32 = rows.name().split('x').map(|factor| factor.parse::<u32>().unwrap()).product();
        assert!(chunks <= capacity, "{chunks} chunks in {rows:?}");
        let idle = capacity - chunks;
        assert!(
            idle < 128.max(capacity / 4) || capacity <= 128,
            "{chunks} chunks leave {idle} of {rows:?} idle"
        );
    }
    assert_eq!(RowPartition::for_chunks(RowPartition::MAX_CHUNKS + 1), None);
}

#[test]
fn the_host_vectorizes_aligned_loads() {
    let call = |x, (rows, hidden), strides: [u64; 2]| {
        let [x, out] = [(x, strides[0]), (512, strides[1])]
            .map(|(address, stride)| Strided { address, strides: [stride, 0] });
        NormParams {
            dtypes: (Dtype::Bf16, Dtype::Bf16),
            shape: [rows, 1, hidden],
            x,
            residual: None,
            out: (out, Dtype::Bf16),
            weight: (768, 1),
            bias: None,
            scale: None,
            eps: 1e-5,
            offset: 0.0,
        }
    };
    let of = |x, shape, strides| call(x, shape, strides).config();
    assert_eq!(of(256, (2, 4096), [4096; 2]).width, 8);
    assert_eq!(of(258, (2, 4096), [4096; 2]).width, 1, "an address");
    assert_eq!(of(256, (2, 4096), [4100, 4096]).width, 1, "a stride");
    assert_eq!(of(256, (2, 4095), [4096; 2]).width, 1, "a length");
    let call = call(256, (2, 4096), [4096; 2]);
    assert_eq!(NormParams { dtypes: (Dtype::Bf16, Dtype::F32), ..call }.config().width, 4, "beside f32");
    assert_eq!(NormParams { weight: (768, 2), ..call }.config().width, 1, "a weight with gaps");
    assert_eq!(of(256, (1, 1 << 16), [1 << 16; 2]).rows, None, "a row that registers do not hold");
}
