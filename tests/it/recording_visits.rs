//! Shadow sets on disk: a run that chose them by speeds is repeated at other speeds to the bit, and a file that cannot be
//! followed is refused, or left and said to be.

use std::fs;
use std::path::Path;

use guildhall::launch::Rank;
use guildhall::moe::recording::{Visiting, Visits};
use guildhall::moe::{self, Recording, Routings};
use guildhall::parallel::{Degrees, ExpertTable, Mesh, Order, Rates};

use crate::parity::{Run, STEPS, compare, run_on, train_on};
use crate::program::{RUN, Workshop, flip};
use crate::recording::{ROWS, recorded};
use crate::tiny::{Recipe, mixtral};
use crate::world::{ONE, Shape, shape, sliced};

const MICRO_BATCH: usize = 4;

/// With slow arithmetic and fast links any expert that is hotter than others visits; the other way round none does.
const SLOW_ARITHMETIC: Rates = Rates { flops: 1e6, bandwidth: 1e15 };
const SLOW_LINKS: Rates = Rates { flops: 1e15, bandwidth: 1e6 };

/// Two MoE layers of four experts that visit where that pays.
fn recipe() -> Recipe {
    let mut sizes = mixtral();
    sizes.moe.iter_mut().for_each(|moe: &mut moe::Config| moe.shadowing = "auto".to_owned());
    Recipe { sizes, rows: ROWS, micro_batch: MICRO_BATCH }
}

/// What sets depend on where both layers' experts lie on as many ranks as the shape says, or each on its own number.
fn visiting(shape: Shape, degrees: [usize; 2]) -> Visiting {
    let tables = degrees.map(|degree| ExpertTable::even(4, degree));
    Visiting::new(&recorded(&recipe().sizes), shape, &tables, MICRO_BATCH)
}

fn recording_to(path: &Path, visiting: Visiting) -> Routings {
    let routes = recorded(&recipe().sizes);
    Routings {
        record: Some(Recording::create(path, routes, 1).unwrap()),
        record_visits: Some(Visits::create(&Visits::beside(path), visiting, 1).unwrap()),
        ..Routings::NONE
    }
}

fn following(path: &Path, visiting: Visiting) -> Routings {
    let replay_visits = Visits::follow(&Visits::beside(path), visiting, 1..=STEPS).unwrap().unwrap();
    Routings { replay_visits: Some(replay_visits), ..following_routes(path) }
}

fn following_routes(path: &Path) -> Routings {
    let replay = Some(Recording::open(path, recorded(&recipe().sizes), 1..=STEPS).unwrap());
    Routings { replay, ..Routings::NONE }
}

fn train(shape: Shape, rates: Rates, routings: Routings) -> Run {
    run_on(&recipe(), shape, routings, |_, mesh| mesh.clone().with_rates(rates))
}

fn visits(run: &Run) -> Vec<u64> {
    run.reports.iter().map(|report| report.shadowed).collect()
}

/// Reports have the rows that travelled and how many visited; with the weights and moments all must be the same bits.
#[test]
fn what_speeds_chose_is_repeated_at_other_speeds_to_the_bit() {
    let folder = tempfile::tempdir().unwrap();
    let [first, again] = ["first", "again"].map(|name| folder.path().join(name));
    let other_order = Shape { order: Order::DataExpert, ..shape(4, 2) };
    for shape in [shape(2, 2), shape(4, 2), shape(4, 4), other_order, sliced(4, 2, 2), sliced(8, 2, 2)] {
        let own = || visiting(shape, [shape.expert; 2]);
        let want = train(shape, SLOW_ARITHMETIC, recording_to(&first, own()));
        assert!(visits(&want).iter().sum::<u64>() > 0, "{shape:?}: none visits");

        // Routing alone leaves the sets to the speeds: others, and with them sums in another order.
        let anew = train(shape, SLOW_LINKS, following_routes(&first));
        assert_eq!(visits(&anew), [0; STEPS as usize], "{shape:?}");
        assert!(anew.weights != want.weights, "{shape:?}: shadows are not seen in the bits");
        compare(&format!("{shape:?}, sets decided anew"), &anew, &want);

        let both = Routings { record: None, record_visits: None, ..following(&first, own()) };
        let record = recording_to(&again, own());
        let both = Routings { record: record.record, record_visits: record.record_visits, ..both };
        let got = train(shape, SLOW_LINKS, both);
        assert_eq!(visits(&got), visits(&want), "{shape:?}");
        assert!(got == want, "{shape:?}: other bits");
        for path in [|path: &Path| path.to_owned(), Visits::beside] {
            assert!(fs::read(path(&first)).unwrap() == fs::read(path(&again)).unwrap(), "{shape:?}: other files");
        }
    }
}

/// Each layer has expert groups of its own.
#[test]
fn layers_of_several_degrees_keep_their_own_sets() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("routes");
    for (shape, degrees) in [(shape(4, 1), [4, 2]), (sliced(4, 2, 1), [1, 2])] {
        let run = |rates: Rates, routings: Routings| {
            let routings = std::sync::Arc::new(routings);
            let mesh = |rank: &Rank, _: &Mesh| {
                let mesh = Mesh::of_degrees(rank.world.clone(), shape, Degrees::Each(degrees.to_vec())).unwrap();
                let of_degree = |mesh: Mesh, degree: usize| mesh.at(degree).with_rates(rates);
                degrees.into_iter().fold(mesh, of_degree).at(degrees.into_iter().max().unwrap())
            };
            train_on(&recipe(), shape, mesh, |trainer| trainer.routings = routings.clone())
        };
        let want = run(SLOW_ARITHMETIC, recording_to(&path, visiting(shape, degrees)));
        assert!(visits(&want).iter().sum::<u64>() > 0, "{degrees:?}: none visits");
        assert!(run(SLOW_LINKS, following(&path, visiting(shape, degrees))) == want, "{degrees:?}");
    }
}
