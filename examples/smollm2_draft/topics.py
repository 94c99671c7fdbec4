"""The words that `prompts.py` fills its templates with.

Owns: lists of topics, tasks and situations, written for this example.

Does not know: templates, models, files.
"""

SCIENCE = """photosynthesis|gravity|the water cycle|plate tectonics|black holes|the immune system|DNA replication|
natural selection|the greenhouse effect|nuclear fusion|how vaccines work|the periodic table|chemical bonds|entropy|
electric circuits|magnetism|sound waves|the speed of light|the Doppler effect|the human heart|digestion|neurons|
osmosis|mitosis|enzymes|antibiotics|viruses and bacteria|food chains|coral reefs|volcanoes|earthquakes|tides|
the ozone layer|comets|the phases of the moon|eclipses|the big bang|dark matter|quantum entanglement|semiconductors|
lasers|batteries|superconductors|radioactivity|carbon dating|acids and bases|combustion|crystals|fermentation|
pollination|animal migration|hibernation|camouflage|fossils|glaciers|hurricanes|lightning|rainbows|erosion|
soil formation|the nitrogen cycle|stem cells|genetic inheritance|blood types|the lungs|the kidneys|bones and joints|
sleep cycles|memory|colour vision|hearing|taste and smell|hormones|allergies|aging|probability|prime numbers|
fractions|the Pythagorean theorem|exponential growth|statistics and averages|calculus|game theory|cryptography|
recursion|binary numbers|logic gates|neural networks|search engines|databases|operating systems|the internet|GPS|
radar|3D printing|wind turbines|solar panels|hydroelectric dams|nuclear power plants|electric cars|airplanes|
rockets|submarines|bridges|refrigerators|microwaves|clocks|telescopes|microscopes|touch screens|inflation|
supply and demand|compound interest|the stock market|insurance|taxes|mortgages|international trade|unemployment|
central banks|cryptocurrencies"""

SOCIETY = """the French Revolution|the Roman Empire|ancient Egypt|the Silk Road|the Renaissance|
the Industrial Revolution|World War I|the Cold War|the civil rights movement|the printing press|the Vikings|
the Ottoman Empire|the Aztecs|the Great Depression|the Space Race|the fall of the Berlin Wall|democracy|
constitutions|human rights|the United Nations|elections|the judicial system|federalism|free speech|
philosophy of Socrates|stoicism|utilitarianism|existentialism|Buddhism|Greek mythology|Norse mythology|
Shakespeare's plays|the novel|haiku|impressionism|surrealism|jazz|classical music|opera|hip hop|ballet|photography|
cinema|architecture|pottery|calligraphy|fashion|chess|football|basketball|tennis|the Olympic Games|marathon running|
swimming|cycling|yoga|martial arts|gardening|beekeeping|bread baking|cheese making|coffee|tea|chocolate|sushi|pasta|
street food|vegetarian diets|nutrition labels|meditation|habits|procrastination|teamwork|leadership|negotiation|
public speaking|job interviews|remote work|time management|budgeting|saving money|volunteering|recycling|
public transport|urban planning|renewable energy|biodiversity|deforestation|water scarcity|fast fashion|
social media|online privacy|cyberbullying|artificial intelligence|video games|board games|podcasts|libraries|
museums|homeschooling|learning a language|raising a puppy|cats|horses|birds|aquariums|houseplants|camping|hiking|
road trips|Japan|Brazil|Kenya|Iceland|India|Mexico|Canada|Australia|Italy|Egypt|New York|Paris|Tokyo|Cape Town|
Istanbul"""

SITUATIONS = """a missed deadline at work|a noisy neighbour|a lost package|a job application|a sick day|
a birthday party|a wedding invitation|a broken laptop|a refund for a faulty kettle|a room booking at a hotel|
a change of meeting time|a thank-you after an interview|a complaint about slow internet|a raise|
a letter of recommendation|a school trip|a parking ticket|a dentist appointment|a gym membership|
a farewell to a colleague|a new team member|a product launch|a garden shed|a charity run|a book club|
a surprise dinner|a delayed flight|an apartment viewing|a used bicycle for sale|a piano lesson|a leaking tap|
a kitten adoption|a group project|a scholarship|a research survey|a newsletter|a community clean-up|
a software bug report|a budget cut|a customer survey|an internship|a retirement party|a movie night|
a rental contract|a vegetarian menu|a lost wallet|a broken window|a car repair|a conference talk|
a mentoring programme"""

PEOPLE = """a beginner|a ten-year-old|a busy parent|a college student|a retired teacher|a software engineer|a nurse|
a small business owner|someone who hates reading|my grandmother|a high school class|a new manager|a tourist|
a farmer|a musician|an athlete"""

CHARACTERS = """a lonely lighthouse keeper|a talking fox|a robot who learns to paint|two rival bakers|
a time-travelling librarian|a shy dragon|a detective in a small village|a girl who finds a map|an old fisherman|
a clockmaker|a lost astronaut|a baker's apprentice|a cat that runs a bookshop|a retired spy|
twins separated at birth|a gardener with a secret|a violinist who goes deaf|a young queen|a taxi driver at night|
a boy and his kite|a ghost who is afraid of people|a chef on a spaceship|a street artist|a snow leopard"""

LISTS = """ways to save energy at home|healthy breakfast ideas|tips for sleeping better|
benefits of regular exercise|questions to ask in an interview|gifts for a friend who likes cooking|
things to pack for a beach holiday|names for a coffee shop|ideas for a science fair|hobbies for winter|
reasons to learn programming|foods rich in iron|exercises without equipment|icebreakers for a meeting|
ways to reduce stress|common mistakes in essay writing|safety rules for a laboratory|cheap dinner recipes|
indoor games for children|features of a good website|signs of a scam e-mail|steps to start a small business|
tips for taking better photos|ways to make new friends|books every child should read|plants that need little water|
first aid tips|topics for a podcast|activities for a rainy day|ideas for a short film|ways to practise English|
arguments for public parks|inventions that changed the world|endangered animals|famous bridges|
musical instruments from around the world|properties of water|uses of artificial intelligence in medicine|
tips for public speaking|ways to teach fractions|habits of good students|security tips for passwords|
differences between cats and dogs|snacks for a long hike|questions for a first date|slogans for a bicycle shop|
ways to reuse glass jars|study techniques"""

PLAIN = """The meeting were moved to monday because the boss are ill.|
We was going to the store when it start raining.|Their are many reason why people dont exercise enough.|
I has been working here since five years and likes it.|
The report it was finish by the team but nobody have read it.|She dont know weather to buy the red or blue car.|
Me and him goes fishing every weekends with our dad.|The movie was good but the ending it was very confuse.|
Our company sell many product that is cheap and good quality.|He speak english very good because he live in London.|
The dog chased it's tail for a hour before it gets tired.|If I would have known, I would of came earlier.|
Each of the student have their own locker in the hall.|The informations you send me was very useful, thanks you.|
I look forward to meet you and discuss about the project.|There is less people in the park then yesterday."""

SENTENCES = """The old train rolled slowly through the valley as the sun went down.|
Our shop will be closed on Friday for repairs.|Scientists have found a new species of frog in the rain forest.|
The city plans to build four new parks by next summer.|
I forgot my keys at the office and had to wait outside for two hours.|The team won the match in the last minute.|
Regular exercise can lower the risk of heart disease.|My sister moved to Spain to study architecture.|
The new phone has a better camera but a shorter battery life.|Please send me the signed contract before noon.|
Learning to cook saves money and is fun.|The museum shows paintings from the seventeenth century.|
Heavy snow closed the mountain road for three days.|The teacher praised the class for its hard work.|
A good night's sleep helps the brain store memories.|The restaurant on the corner serves the best soup in town.|
Many people work from home at least one day a week.|The river has been cleaner since the factory closed."""

CODE_TASKS = """reverse a string|check whether a number is prime|compute the factorial of a number|
merge two sorted lists|find the second largest element of a list|count the vowels in a string|
remove duplicates from a list while keeping order|flatten a nested list|compute the greatest common divisor|
sort a dictionary by value|read a CSV file and print the first rows|count word frequencies in a text file|
convert Celsius to Fahrenheit|generate the Fibonacci sequence|implement binary search|implement bubble sort|
implement quicksort|implement a stack|implement a queue with two stacks|implement a linked list|
traverse a binary tree in order|find the longest common prefix of a list of strings|
check if two strings are anagrams|check if a string has balanced brackets|transpose a matrix|multiply two matrices|
rotate a list by k positions|find all pairs that sum to a target|download a web page|parse a JSON file|
send an HTTP request|write a log file|measure the running time of a function|cache the results of a function|
make a simple calculator|make a guessing game|make a to-do list program|
validate an e-mail address with a regular expression|convert a number to binary|convert Roman numerals to integers|
compute the average of a list|compute the median of a list|compute the standard deviation|find the mode of a list|
split a list into chunks|zip two lists into a dictionary|capitalise every word in a sentence|
encrypt text with a Caesar cipher|count the lines in a file|list all files in a directory|rename files in a folder|
draw a triangle of stars|print the multiplication table|sum the digits of a number|
find the missing number in a list|check if a year is a leap year|
compute the power of a number without using the power operator|find the intersection of two lists|
group words by their first letter|compute the edit distance of two strings|solve the towers of Hanoi|
find the shortest path in a graph|do a breadth-first search|do a depth-first search|model a bank account|
model a library with books and readers|model a shape with an area method|use a decorator|use a generator|
use a context manager|handle exceptions when reading a file|plot a sine wave|query a SQLite database|
scrape the titles from a web page|compute compound interest|simulate rolling dice|shuffle a deck of cards"""

LANGUAGES = "Python|Python|Python|Python|JavaScript|Java|C++|C|Go|SQL|Bash|HTML and CSS"


def words(block: str) -> list[str]:
    """Split one of the `|`-separated lists above."""
    return [" ".join(word.split()) for word in block.split("|")]
