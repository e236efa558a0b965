//! Copies rows: embeddings of tokens, pages from one place of a pool to another.
//!
//! ```text
//! out[to[i]] = table[from[i]], rounded to out's dtype
//! ```
//!
//! Shapes: table, out `[_, width]` of any dtype, rows any stride apart; from, to i32 `[rows]`, not negative, in the table and in out,
//! no two of `to` the same; without `to`, row i goes to row i. A row that is copied to another row of the same tensor must not be
//! written by the same launch. Sizes are known at launch.

use crate::tile::{Shares, Strided, StridedRows, chunk};
use tilewright::Dtype;
use tilewright_ptx::{
    build::{Builder, Global},
    ir::Kernel,
    isa::memory::Access,
    sim::Arg,
    verify::Invalid,
};

/// Chunks of a thread.
const EACH: u32 = 4;

/// What a kernel is made for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Copy {
    /// Of the table, and of the result.
    pub dtypes: (Dtype, Dtype),
    /// Elements that are loaded at once: 1, or [`chunk::most`].
    pub width: u32,
}

/// One launch.
#[derive(Debug, Clone, Copy)]
pub struct Call {
    /// Of the table, and of the result.
    pub dtypes: (Dtype, Dtype),
    /// Rows that are copied, and elements of a row.
    pub shape: [u32; 2],
    /// Where they come from; the second stride has no meaning.
    pub table: Strided,
    /// Address of the numbers of their rows there.
    pub from: u64,
    /// Where they go; the second stride has no meaning.
    pub out: Strided,
    /// Address of the numbers of their rows there, or 0: one after the other.
    pub to: u64,
}

impl Call {
    /// The kernel for it.
    pub fn copy(&self) -> Copy {
        let (table, out) = self.dtypes;
        let [a, b] = [(self.table, table), (self.out, out)]
            .map(|(rows, dtype)| Strided { strides: [rows.strides[0], 0], ..rows }.alignment(dtype));
        let width = chunk::width(&[table, out], a.into_iter().chain(b).chain([u64::from(self.shape[1])]));
        Copy { dtypes: self.dtypes, width }
    }

    /// Grid and arguments for [`Call::copy`]; there is at least one row and one element.
    pub fn launch(&self) -> ([u32; 3], Vec<Arg>) {
        let chunks = self.shape[1] / self.copy().width;
        let threads = chunks.div_ceil(EACH);
        let mut args = self.table.args().to_vec();
        args.extend(self.out.args());
        args.extend([self.from, self.to].map(Arg::U64));
        args.extend([self.shape[0], threads, chunks].map(Arg::U32));
        let [x, y] = Shares::new(threads).ctas(self.shape[0]);
        ([x, y, 1], args)
    }
}

impl Copy {
    /// A name that no other configuration has.
    pub fn name(self) -> String {
        format!("copy_rows_{}_{}_{}", self.dtypes.0, self.dtypes.1, self.width)
    }
}

/// The kernel of a configuration; its parameters are those of [`Call::launch`].
///
/// # Errors
/// None.
pub fn copy(name: &str, config: Copy) -> Result<Kernel, Invalid> {
    Builder::kernel(name, Shares::THREADS, |k| {
        let table = StridedRows::param(k, "table", config.dtypes.0);
        let out = StridedRows::param(k, "out", config.dtypes.1);
        let (from, to) = (k.global::<u32>("from"), k.param::<u64>("to"));
        let [rows, threads, chunks] = ["rows", "threads", "chunks"].map(|name| k.param::<u32>(name));
        let (row, first, is_there) = Shares::place(k, (rows, threads));
        k.when(is_there, || {
            let target = k.var::<u32>("target", row);
            k.when(to.ne(0), || target.set(Global::<u32>::new(to).at(row).load()));
            let [from, to] = [(table, from.at(row).load()), (out, target.get())]
                .map(|(rows, row)| rows.row(row, k.constant(0)));
            let place = |i| {
                let chunk = first + threads * i;
                (chunk.lt(chunks), chunk * config.width)
            };
            let load = |i| {
                let (is_there, at) = place(i);
                from.at(at).load_when(is_there, config.width, Access::Streaming)
            };
            let loaded: Vec<_> = (0..EACH).map(load).collect();
            for (i, chunk) in (0..EACH).zip(loaded) {
                let (is_there, at) = place(i);
                let chunk = chunk.to(config.dtypes.1);
                k.when(is_there, || chunk.store(to.at(at)));
            }
        });
    })
}
