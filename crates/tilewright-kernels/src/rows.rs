//! Row copies: token embedding lookup, and page copies within a pool.
//!
//! ```text
//! out[to[i]] = table[from[i]], rounded to out's dtype
//! ```
//!
//! Shapes: table, out `[_, width]` of any dtype and row stride; from, to i32 `[rows]`, valid row indices; `to` has no
//! duplicates. Without `to`, row i is written to row i. A launch must not read a row that it also writes. Sizes are
//! launch parameters.

use crate::{
    params::GlobalArray,
    tile::{Strided, TokenPartition, chunk},
};
use tilewright::Dtype;
use tilewright_ptx::{Access, Arg, Builder, Global, Invalid, Kernel};

const CHUNKS_PER_THREAD: u32 = 4;

/// Compile-time configuration of the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct CopyRowsConfig {
    /// Dtypes of the table and of the result.
    pub dtypes: (Dtype, Dtype),
    /// Elements per load: 1, or `chunk::max_width`.
    pub width: u32,
}

crate::params! {
    /// Parameters of one launch.
    #[derive(Debug, Clone, Copy)]
    pub struct CopyRowsParams => CopyRowsRegs(this, config: CopyRowsConfig) {
        /// Dtypes of the table and of the result.
        host dtypes: (Dtype, Dtype),
        /// `[rows, width]` of the copy.
        host shape: [u32; 2],
        /// Source rows; the second stride is unused.
        table: Strided[config.dtypes.0],
        /// Destination rows; the second stride is unused.
        out: Strided[config.dtypes.1],
        /// Address of the source row indices.
        from: u64 as GlobalArray<u32>,
        /// Address of the destination row indices, or 0 for `0..rows`.
        to: u64,
        rows: u32 = this.shape[0],
        threads: u32 = (this.shape[1] / config.width).div_ceil(CHUNKS_PER_THREAD),
        chunks: u32 = this.shape[1] / config.width,
    }
}

impl CopyRowsParams {
    /// Configuration of the kernel for this launch.
    pub fn config(&self) -> CopyRowsConfig {
        let (table, out) = self.dtypes;
        let [a, b] = [(self.table, table), (self.out, out)]
            .map(|(rows, dtype)| Strided { strides: [rows.strides[0], 0], ..rows }.alignment(dtype));
        let width = chunk::width(&[table, out], a.into_iter().chain(b).chain([u64::from(self.shape[1])]));
        CopyRowsConfig { dtypes: self.dtypes, width }
    }

    /// Grid and arguments for [`CopyRowsParams::config`]. Requires at least one row and one element.
    pub fn launch(&self) -> ([u32; 3], Vec<Arg>) {
        let config = self.config();
        let threads = (self.shape[1] / config.width).div_ceil(CHUNKS_PER_THREAD);
        let [x, y] = TokenPartition::new(threads).ctas(self.shape[0]);
        ([x, y, 1], self.args(config))
    }
}

impl CopyRowsConfig {
    /// Kernel name, unique per configuration.
    pub fn name(self) -> String {
        format!("copy_rows_{}_{}_{}", self.dtypes.0, self.dtypes.1, self.width)
    }
}

/// Records the kernel of a configuration. Its parameters are those of [`CopyRowsParams::launch`].
///
/// # Errors
/// None.
pub fn copy(name: &str, config: CopyRowsConfig) -> Result<Kernel, Invalid> {
    Builder::dependent_kernel(name, TokenPartition::THREADS, |k| {
        let CopyRowsRegs { table, out, from, to, rows, threads, chunks } = CopyRowsRegs::declare(k, config);
        let (row, first, in_bounds) = TokenPartition::locate(k, rows, threads);
        k.when(in_bounds, || {
            let target = k.var::<u32>("target", row);
            k.when(to.ne(0), || target.set(Global::<u32>::new(to).at(row).load()));
            let [from, to] = [(table, from.at(row).load()), (out, target.get())]
                .map(|(rows, row)| rows.row(row, k.constant(0)));
            let locate_chunk = |i| {
                let chunk = first + threads * i;
                (chunk.lt(chunks), chunk * config.width)
            };
            let load = |i| {
                let (in_bounds, at) = locate_chunk(i);
                from.at(at).load_when(in_bounds, config.width, Access::Streaming)
            };
            let loaded: Vec<_> = (0..CHUNKS_PER_THREAD).map(load).collect();
            for (i, chunk) in (0..CHUNKS_PER_THREAD).zip(loaded) {
                let (in_bounds, at) = locate_chunk(i);
                let chunk = chunk.to(config.dtypes.1);
                k.when(in_bounds, || chunk.store(to.at(at)));
            }
        });
    })
}
