//! Deadlock reports: the waiting threads, their source lines, and the barriers that they wait for.

use super::{Cluster, Cta, Fault, FaultKind, Group, Wait, Warp, World};

/// The maximum number of waiting groups in a report.
const LINES: usize = 16;

struct WaitingGroup<'a> {
    cta: &'a Cta,
    warp: &'a Warp,
    group: &'a Group,
}

fn all(clusters: &[Cluster]) -> impl Iterator<Item = WaitingGroup<'_>> {
    let ctas = clusters.iter().flat_map(|cluster| &cluster.ctas);
    let warps = ctas.flat_map(|cta| cta.warps.iter().map(move |warp| (cta, warp)));
    warps.flat_map(|(cta, warp)| warp.groups.iter().map(move |group| WaitingGroup { cta, warp, group }))
}

impl WaitingGroup<'_> {
    /// The step that waits.
    fn pc(&self) -> u32 {
        self.group.pc - u32::from(matches!(self.group.wait, Wait::Barrier(_)))
    }

    /// The mbarrier that the first lane waits for, and its phase.
    fn mbarrier(&self) -> Option<(u32, u64)> {
        let spins = matches!(self.group.wait, Wait::Phase | Wait::None);
        self.warp.waits[self.group.mask.trailing_zeros() as usize].filter(|_| spins)
    }

    /// The fault kind of this wait.
    fn kind(&self) -> FaultKind {
        // exited lanes and warps never arrive; waiting ones might
        let ended = match self.group.wait {
            Wait::Lanes => self.warp.groups.iter().fold(0, |live, group| live | group.mask) != !0,
            Wait::Warpgroup => {
                let first = self.warp.index as usize & !3;
                self.cta.warps[first..first + 4].iter().any(|warp| !warp.live())
            }
            _ => false,
        };
        if ended {
            return FaultKind::Divergence;
        }
        let barrier = self.mbarrier().and_then(|(offset, _)| self.cta.mbarriers.get(&offset));
        match barrier {
            Some(barrier) if barrier.pending == 0 && barrier.bytes != 0 => FaultKind::WrongTransactionCount,
            _ => FaultKind::Deadlock,
        }
    }

    fn explain(&self, world: &World<'_>) -> String {
        let what = match self.group.wait {
            Wait::Lanes => "the other lanes of their warp".to_owned(),
            Wait::Warpgroup => "the other warps of their warpgroup".to_owned(),
            Wait::Cluster => "the barrier of the cluster".to_owned(),
            Wait::Barrier(id) => {
                let barrier = &self.cta.barriers[id];
                format!("barrier {id}, where {} of {} threads arrived", barrier.arrived, barrier.expected)
            }
            Wait::Phase | Wait::None => self.explain_mbarrier(world),
        };
        format!(
            "CTA {:?} warp {} lanes {:#x} at {}: {what}",
            self.cta.id,
            self.warp.index,
            self.group.mask,
            world.line(self.pc())
        )
    }

    fn explain_mbarrier(&self, world: &World<'_>) -> String {
        let Some((offset, phase)) = self.mbarrier() else { return "nothing that is known".to_owned() };
        let name = world.program.arrays.name(offset as usize);
        let Some(barrier) = self.cta.mbarriers.get(&offset) else {
            return format!("an mbarrier at {name} that is no longer one");
        };
        let arrivals = match barrier.pending {
            0 => String::new(),
            left => format!(", where {left} of {} arrivals are missing", barrier.expected),
        };
        let bytes = match (barrier.bytes, barrier.expecter) {
            (0, _) => String::new(),
            (bytes, Some(pc)) => {
                format!(", which waits for {bytes} more bytes, expected by {}", world.line(pc))
            }
            (bytes, None) => format!(", which waits for {bytes} more bytes that nobody expected"),
        };
        format!("phase {phase} of the mbarrier at {name}{arrivals}{bytes}")
    }
}

fn fault(world: &World<'_>, kind: FaultKind, clusters: &[Cluster], head: &str) -> Fault {
    let waiting: Vec<WaitingGroup<'_>> = all(clusters).collect();
    let blamed = waiting.iter().find(|waiting| waiting.kind() == kind).or(waiting.first());
    let mut lines: Vec<String> = waiting.iter().take(LINES).map(|waiting| waiting.explain(world)).collect();
    if waiting.len() > LINES {
        lines.push(format!("and {} more", waiting.len() - LINES));
    }
    let message = format!("{head}: {}", lines.join("; "));
    match blamed {
        None => Fault::of_launch(kind, message),
        Some(blamed) => Fault {
            kind,
            message,
            at: world.program.at.get(blamed.pc() as usize).copied(),
            cta: blamed.cta.id,
            warp: blamed.warp.index,
            lanes: blamed.group.mask,
        },
    }
}

/// The fault when no thread of the grid can run.
pub(super) fn explain(world: &World<'_>, clusters: &[Cluster]) -> Fault {
    let kinds: Vec<FaultKind> = all(clusters).map(|waiting| waiting.kind()).collect();
    let kind = [FaultKind::WrongTransactionCount, FaultKind::Divergence, FaultKind::Deadlock]
        .into_iter()
        .find(|kind| kinds.contains(kind))
        .unwrap_or(FaultKind::Deadlock);
    fault(world, kind, clusters, "nothing can go on")
}

/// The fault when threads run without progress.
pub(super) fn no_progress(world: &World<'_>, clusters: &[Cluster], steps: u64) -> Fault {
    let waits = all(clusters).any(|waiting| waiting.group.wait != Wait::None || waiting.mbarrier().is_some());
    let kind = if waits { FaultKind::Deadlock } else { FaultKind::RunsForever };
    fault(world, kind, clusters, &format!("nothing changed in {steps} instructions of warps"))
}
