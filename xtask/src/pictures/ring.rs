//! A ring over time: what a run of the simulator did, event by event.
//!
//! A producer and a consumer write down each event with a ticket that an atomic counter gives them: after waiting, and before
//! arriving. So tickets are in the order of cause and effect.

use super::svg::{Area, Canvas, Colour, Raster};
use tilewright_kernels::tile::{Cursor, Ring};
use tilewright_ptx::{
    build::{Builder, Global, Value},
    ir::Kernel,
    isa::{
        memory::{AtomicOp, Order, Scope},
        sync::Fence,
    },
    sim::{Arg, Launch, Memory},
    verify::Invalid,
};

const STAGES: u32 = 3;
const TILES: u32 = 8;
const BYTES: u32 = 64;
/// One of the runs that are possible: the producer is ahead, then fills each stage that becomes empty.
const SEED: u64 = 27;

/// What happens to a tile.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// The producer found its stage empty.
    Fill,
    /// The consumer found it full.
    Full,
    /// The consumer is done with it.
    Release,
}

#[derive(Debug, Clone, Copy)]
struct Event {
    kind: Kind,
    tile: usize,
    stage: usize,
    parity: u32,
}

/// Where events are written down.
#[derive(Clone, Copy)]
struct Log<'k> {
    next: Global<'k, u32>,
    events: Global<'k, u32>,
}

impl<'k> Log<'k> {
    fn add(self, kind: Kind, tile: Value<'k, u32>, cursor: Cursor<'k>) {
        let ticket = self.next.atomic(AtomicOp::AddU32, 1, (Order::Relaxed, Scope::Cta));
        let (k, to) = (tile.builder(), self.events.at(ticket * 4));
        to.store_vector([k.constant(kind as u32), tile, cursor.stage(), cursor.turn()]);
    }
}

fn kernel() -> Result<Kernel, Invalid> {
    Builder::kernel("ring", 64, |k| {
        let log = Log { next: k.global("next"), events: k.global("events") };
        let from = k.global::<u32>("from");
        let tiles = k.shared::<u32>("tiles", (STAGES * BYTES / 4) as usize, 16);
        let ring = Ring::new(k, "tiles", STAGES as usize);
        k.when(k.thread().eq(0), || {
            ring.init(k, 1);
            k.fence(Fence::MbarrierInit);
        });
        k.sync_threads();
        k.when(k.thread().eq(0), || {
            let cursor = ring.cursor(k);
            k.repeat((0, TILES), 1, |tile| {
                let full = cursor.fill(BYTES);
                log.add(Kind::Fill, tile, cursor);
                k.load_bulk(tiles.byte(cursor.stage() * BYTES), from, BYTES, full);
                cursor.advance();
            });
        });
        k.when(k.thread().eq(32), || {
            let cursor = ring.cursor(k);
            k.repeat((0, TILES), 1, |tile| {
                cursor.wait_full();
                log.add(Kind::Full, tile, cursor);
                log.add(Kind::Release, tile, cursor);
                cursor.release();
                cursor.advance();
            });
        });
    })
}

/// The events of a run, in order.
fn events(seed: u64) -> Result<Vec<Event>, String> {
    let kernel = kernel().map_err(|why| why.to_string())?;
    let mut memory = Memory::new();
    let count = 3 * TILES as usize;
    let (next, log) = (memory.alloc_from(&[0_u32]), memory.alloc(16 * count));
    let from = memory.alloc_from(&[0_u32; BYTES as usize / 4]);
    let args = [next, log, from].map(Arg::U64);
    let launch = Launch { kernel: &kernel, grid: [1, 1, 1], args: &args, seed };
    launch.run(&mut memory).map_err(|fault| fault.to_string())?;
    let words = memory.read::<u32>(log, 4 * count).map_err(|fault| fault.to_string())?;
    let kinds = [Kind::Fill, Kind::Full, Kind::Release];
    let event = |words: &[u32]| Event {
        kind: kinds[words[0] as usize],
        tile: words[1] as usize,
        stage: words[2] as usize,
        parity: words[3],
    };
    Ok(words.chunks_exact(4).map(event).collect())
}

/// Time is from left to right, a column an event; a line for each side and each stage.
pub(super) fn turns() -> Result<String, String> {
    let events = events(SEED)?;
    let raster = Raster { corner: (92, 90), cell: (32, 40) };
    let mut canvas = Canvas::new(
        (880, 380),
        &format!("A ring of {STAGES} stages over time: {TILES} tiles, one producer, one consumer"),
        &format!(
            "A run of the simulator (seed {SEED}); a column is an event. Tiles are coloured by their turn around the ring."
        ),
    );
    let lines = 2 + STAGES as usize;
    for line in 0..lines {
        let name = match line {
            0 => "producer".to_owned(),
            _ if line == lines - 1 => "consumer".to_owned(),
            _ => format!("stage {}", line - 1),
        };
        let area = raster.span((line, 0), (1, events.len()));
        canvas.blank(Area { height: area.height - 6, ..area }, "");
        canvas.label((20, area.y + 21), &name);
    }
    for (at, event) in events.iter().enumerate() {
        draw(&mut canvas, raster, &events, (at, event));
    }
    let texts = [
        "producer, p: the parity of its turn. It has waited until empty is over for the other parity: the turn before.",
        "consumer, p: the parity of its turn. It has waited until full is over for this parity; then it reads, and arrives at empty.",
        "stage: light while bytes are on their way or wait to be read, strong while the consumer reads them, grey while empty.",
    ];
    for (line, text) in texts.iter().enumerate() {
        canvas.label((20, 318 + 20 * line), text);
    }
    Ok(canvas.finish())
}

/// An event, and what its stage is from then on until the next event of the tile.
fn draw(canvas: &mut Canvas, raster: Raster, events: &[Event], (at, event): (usize, &Event)) {
    let ends = |kind| events.iter().position(|other| other.kind == kind && other.tile == event.tile);
    let consumer = 1 + STAGES as usize;
    let (line, until) = match event.kind {
        Kind::Fill => (0, ends(Kind::Full)),
        Kind::Full => (consumer, ends(Kind::Release).map(|end| end + 1)),
        Kind::Release => return,
    };
    let turn = events.iter().filter(|other| other.kind == Kind::Fill && other.stage == event.stage);
    let colour = Colour::of(2 * turn.take_while(|other| other.tile != event.tile).count());
    let inset = |area: Area| Area { height: area.height - 6, ..area };
    let width = if event.kind == Kind::Full { 2 } else { 1 };
    let own = inset(raster.span((line, at), (1, width)));
    canvas.cell(own, colour, &format!("p {}", event.parity));
    let held = inset(raster.span((1 + event.stage, at), (1, until.unwrap_or(at + 1) - at)));
    match event.kind {
        Kind::Fill => canvas.cell(held, colour.faint(), &format!("tile {}", event.tile)),
        _ => canvas.cell(held, colour, "read"),
    }
}
