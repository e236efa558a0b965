//! A panel of a tile in shared memory: where the 16-byte chunks of eight rows lie.
//!
//! A kernel says where [`SharedTile`] has each chunk; tensor copies must agree.

use super::svg::{Canvas, Colour, Raster};
use half::bf16;
use tilewright_kernels::tile::SharedTile;
use tilewright_ptx::{
    build::Builder,
    sim::{Arg, Launch, Memory, tensor::Swizzle},
};

/// Byte offsets in a panel, of chunk `i % 8` of row `i / 8`.
fn offsets() -> Result<Vec<u32>, String> {
    let kernel = Builder::kernel("chunks", 64, |k| {
        let out = k.global::<u32>("out");
        let tile = SharedTile::<bf16>::new(k, "tile", (8, 64), 1);
        let thread = k.thread();
        let chunk = tile.chunk(thread >> 3, thread & 7);
        out.at(thread).store(chunk.address() - tile.memory().address());
    });
    let kernel = kernel.map_err(|why| why.to_string())?;
    let mut memory = Memory::new();
    let out = memory.alloc(64 * 4);
    let launch = Launch { kernel: &kernel, grid: [1, 1, 1], args: &[Arg::U64(out)], seed: 0 };
    launch.run(&mut memory).map_err(|fault| fault.to_string())?;
    memory.read(out, 64).map_err(|fault| fault.to_string())
}

/// The tile as it is meant, and as it lies.
pub(super) fn panel() -> Result<String, String> {
    let offsets = offsets()?;
    let by_copies: Vec<u32> = (0..64).map(|at| Swizzle::B128.apply(at * 16)).collect();
    assert_eq!(offsets, by_copies, "kernels and tensor copies disagree on where chunks lie");
    let mut canvas = Canvas::new(
        (890, 330),
        "The 128-byte swizzle: eight rows of a panel",
        "Chunks of 16 bytes (8 elements of 16 bits), coloured by their column; chunk 2 of each row is framed.",
    );
    let meant = Raster { corner: (50, 110), cell: (46, 22) };
    let lies = Raster { corner: (510, 110), cell: (46, 22) };
    canvas.heading((50, 78), "as it is meant: row, and chunk of the row");
    canvas.heading((510, 78), "as it lies: offset, and which chunk is there");
    for (at, offset) in offsets.iter().enumerate() {
        let (row, chunk, place) = (at / 8, at % 8, *offset as usize / 16);
        let text = format!("{row}.{chunk}");
        for area in [meant.at(row, chunk), lies.at(place / 8, place % 8)] {
            canvas.cell(area, Colour::of(chunk), &text);
        }
    }
    for at in (0..64).filter(|at| at % 8 == 2) {
        let place = offsets[at] as usize / 16;
        canvas.frame(meant.at(at / 8, at % 8));
        canvas.frame(lies.at(place / 8, place % 8));
    }
    meant.numbered(&mut canvas, 8, 8);
    for line in 0..8 {
        let (row, column) = (lies.at(line, 0), lies.at(0, line));
        canvas.note((505, row.y + 15), "end", &format!("+{}", 128 * line));
        let banks = format!("{}-{}", 4 * line, 4 * line + 3);
        canvas.note((column.x + 23, 106), "middle", &banks);
    }
    canvas.note((505, 106), "end", "banks");
    canvas.label(
        (50, 310),
        "Eight rows of one chunk, as ldmatrix and wgmma read them, lie in eight different groups of banks.",
    );
    Ok(canvas.finish())
}
